"""How the demo is shown: plain lines and one table, readable without colour."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from coda_cli.demo.agent import Round
from coda_cli.demo.chat import Reply
from coda_engine.contract.snapshot import EngineSnapshot

_SHOWN_CHARS = 78


class View:
    """Prints to standard output."""

    def section(self, title: str) -> None:
        """Print a heading."""
        click.secho(f"\n{title}", bold=True)

    def capabilities(self, snapshot: EngineSnapshot) -> None:
        """Print what the engine can do, and why not where it cannot."""
        self.section(f"The engine: {', '.join(snapshot.served_models)}, context {snapshot.max_context_tokens:,} tokens")
        for feature, capability in snapshot.capabilities.items():
            state = "on " if capability.enabled else "off"
            detail = f": {capability.detail}" if capability.detail else ""
            click.echo(f"  {feature.value:<20} {state}  {capability.reason.value}{detail}")

    def answer(self, question: str, reply: Reply) -> None:
        """Print a question and its answer."""
        click.echo(f"  {question}\n  > {_one_line(reply.text)}\n  {_latency(reply)}")

    def round(self, finished: Round) -> None:
        """Print one round of an agent."""
        reply = finished.reply
        click.echo(
            f"  {finished.session}  {_one_line(finished.action)}\n"
            f"           > {_one_line(finished.outcome)}\n"
            f"           {reply.cached_tokens:,} of {reply.prompt_tokens:,} prompt tokens reused, {_latency(reply)}"
        )

    def rush(self, replies: Sequence[Reply]) -> None:
        """Print who was served when, by order of arrival."""
        for place, reply in enumerate(replies, 1):
            click.echo(
                f"  arrived {place}: {reply.request_id:<12} {reply.prompt_tokens:>6,} tokens, "
                f"{reply.prompt_tokens - reply.cached_tokens:>6,} of them new; {_latency(reply)}"
            )

    def admissions(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Print the engine's admission decisions in the order that they were taken."""
        click.echo("  the engine's decisions, in order (which waiting request is prepared next, and why):")
        for decision in decisions:
            moved = " before the first in line" if decision.get("reordered") else ""
            click.echo(
                f"    {_request_name(str(decision['request_id'])):<14} {decision['reason']:<16} "
                f"of {decision['candidates']} waiting ({decision['feasible']} fit), "
                f"waited {decision['wait_ms']:,.0f} ms, cost {decision['state_cost_ms']:,.0f} ms{moved}"
            )

    def summary(
        self, rounds: Sequence[Round], snapshot: EngineSnapshot, placements: Sequence[Mapping[str, Any]]
    ) -> None:
        """Print the closing table."""
        self.section("Summary")
        click.echo("  session   rounds  prompt tokens    reused  first token ms (median)  whole answer ms (median)")
        for session in sorted({finished.session for finished in rounds}):
            replies = [finished.reply for finished in rounds if finished.session == session]
            prompt = sum(reply.prompt_tokens for reply in replies)
            cached = sum(reply.cached_tokens for reply in replies)
            click.echo(
                f"  {session:<9} {len(replies):>6} {prompt:>14,} {cached / max(1, prompt):>9.0%}"
                f" {_median([reply.ttft_ms for reply in replies]):>24,.0f}"
                f" {_median([reply.total_ms for reply in replies]):>25,.0f}"
            )
        asked = [finished for finished in rounds if finished.asked_for_tool]
        valid = [finished for finished in asked if finished.tool_ran]
        click.echo(f"  tool calls: {len(valid)} of {len(asked)} valid and run")
        steps = snapshot.steps
        click.echo(f"  admission: {_counts(steps.admissions)}; {steps.reordered} put before the first in line")
        click.echo(f"  placement: {_counts(Counter(str(placement['reason']) for placement in placements))}")
        click.echo(f"  engine steps: {steps.prefill} prefill, {steps.mixed} mixed, {steps.pure_decode} decode only")


def _latency(reply: Reply) -> str:
    return f"first token after {reply.ttft_ms:,.0f} ms, whole answer {reply.total_ms:,.0f} ms"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 1]}…"


def _request_name(engine_id: str) -> str:
    """Return the part of vLLM's request id that the client chose: ``chatcmpl-NAME-0a1b2c3d``."""
    return engine_id.removeprefix("chatcmpl-").rpartition("-")[0] or engine_id


def _counts(counts: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"
    )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
