"""Figures of one window of a run, from its requests' records alone: the same arithmetic for every system."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coda_bench.engine.records import RequestRecord
from coda_bench.engine.slo import OTHERS, STANDARD, Slo


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that counts.

    Attributes:
        start_s: Where it begins, seconds from the run's start.
        end_s: Where it ends; what happened later is not looked at.
        blocks: Equal parts that the interval is drawn from.
    """

    start_s: float
    end_s: float
    blocks: int

    @property
    def block_s(self) -> float:
        """Length of a block, seconds."""
        return (self.end_s - self.start_s) / self.blocks

    def block_of(self, at_s: float) -> int | None:
        """Return the block that a moment lies in; None when it is outside the window."""
        if not self.start_s <= at_s < self.end_s:
            return None
        return min(self.blocks - 1, int((at_s - self.start_s) / self.block_s))


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """What one run showed in its window.

    Attributes:
        block_s: Length of a block, seconds.
        output_tokens: Output tokens that arrived, by block.
        slo_tokens: Of them those of requests that keep each SLO, by TTFT limit in seconds, by block.
        useful_tokens: New prompt text and in-window output of requests completed, by block of their completion
            (paper Table 1: a session's first prefix once, appended input, output).
        completed: Requests completed, by block.
        ttft_s: Of requests whose first token arrived in the window, seconds.
        tbt_s: Each time between two tokens in the window, seconds.
        e2e_s: Of requests completed in the window, seconds.
        longest_wait_s: Longest wait for a first token of any request that waited in the window, those still unserved
            at its end included, seconds.
        unserved: Requests without a first token at the window's end.
        deferred_prefill_tokens: New prompt text of those requests: work that the window has put off.
        prompt_tokens: Prompt tokens of requests completed in the window.
        cached_tokens: Of them those that the engine did not compute.
    """

    block_s: float
    output_tokens: tuple[float, ...]
    slo_tokens: dict[float, tuple[float, ...]]
    useful_tokens: tuple[float, ...]
    completed: tuple[float, ...]
    ttft_s: tuple[float, ...]
    tbt_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    longest_wait_s: float
    unserved: int
    deferred_prefill_tokens: int
    prompt_tokens: int
    cached_tokens: int


def figures_of(records: Iterable[RequestRecord], window: Window) -> WindowFigures:
    """Return the figures of ``window``, judged with what was known at its end."""
    seen = [known for record in records if (known := record.until(window.end_s)) is not None]
    done = [r for r in seen if r.finished_s is not None and window.block_of(r.finished_s) is not None]
    unserved = [r for r in seen if r.ttft_s is None]
    return WindowFigures(
        block_s=window.block_s,
        output_tokens=_tokens_by_block(seen, window),
        slo_tokens={slo.ttft_s: _slo_tokens(seen, window, slo) for slo in (STANDARD, *OTHERS)},
        useful_tokens=_by_completion(done, window, [r.new_tokens + _tokens_inside(r, window) for r in done]),
        completed=_by_completion(done, window, [1] * len(done)),
        ttft_s=tuple(r.ttft_s for r in seen if r.ttft_s is not None and window.block_of(r.token_s[0]) is not None),
        tbt_s=tuple(
            later - earlier
            for r in seen
            for earlier, later in pairwise(r.token_s)
            if window.block_of(later) is not None
        ),
        e2e_s=tuple(r.token_s[-1] - r.sent_s for r in done),
        longest_wait_s=max((_wait_s(r, window) for r in seen), default=0.0),
        unserved=len(unserved),
        deferred_prefill_tokens=sum(r.new_tokens for r in unserved),
        prompt_tokens=sum(r.prompt_tokens for r in done if r.cached_tokens is not None),
        cached_tokens=sum(r.cached_tokens or 0 for r in done),
    )


def _wait_s(record: RequestRecord, window: Window) -> float:
    """Return how long a request waited for its first token, 0 when it was served before the window."""
    if record.ttft_s is None:
        return window.end_s - record.sent_s
    return record.ttft_s if record.token_s[0] >= window.start_s else 0.0


def _slo_tokens(records: Sequence[RequestRecord], window: Window, slo: Slo) -> tuple[float, ...]:
    return _tokens_by_block([record for record in records if slo.holds(record)], window)


def _tokens_by_block(records: Iterable[RequestRecord], window: Window) -> tuple[float, ...]:
    counts = [0.0] * window.blocks
    for record in records:
        for at_s in record.token_s:
            block = window.block_of(at_s)
            if block is not None:
                counts[block] += 1
    return tuple(counts)


def _tokens_inside(record: RequestRecord, window: Window) -> int:
    return sum(window.block_of(at_s) is not None for at_s in record.token_s)


def _by_completion(done: Sequence[RequestRecord], window: Window, amounts: Sequence[float]) -> tuple[float, ...]:
    sums = [0.0] * window.blocks
    for record, amount in zip(done, amounts, strict=True):
        block = window.block_of(record.token_s[-1])
        if block is not None:
            sums[block] += amount
    return tuple(sums)


@dataclass(frozen=True, slots=True)
class DrainedFigures:
    """What a finite trace showed that was run until every request had been served.

    Attributes:
        requests: Requests that the trace holds.
        slo_share: Share of them that kept the standard SLO; one that never finished has not.
        output_tps: Output tokens over the time from the first arrival to the last token.
        longest_wait_s: Longest wait for a first token, seconds.
        unfinished: Requests that did not finish within the limit.
    """

    requests: int
    slo_share: float
    output_tps: float
    longest_wait_s: float
    unfinished: int


def drained_figures(records: Sequence[RequestRecord], requests: int, ended_s: float) -> DrainedFigures:
    """Return the figures of a drained trace of ``requests`` requests that was given up at ``ended_s`` at the latest."""
    finished = [record for record in records if record.finished]
    last_s = max((record.token_s[-1] for record in records if record.token_s), default=ended_s)
    first_s = min((record.sent_s for record in records), default=0.0)
    waits = (ended_s - r.sent_s if r.ttft_s is None else r.ttft_s for r in records)
    return DrainedFigures(
        requests=requests,
        slo_share=sum(STANDARD.holds(record) for record in finished) / requests,
        output_tps=sum(len(record.token_s) for record in records) / max(last_s - first_s, 1e-9),
        longest_wait_s=max(waits, default=0.0),
        unfinished=requests - len(finished),
    )
