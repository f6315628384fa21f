"""Tells EngineCore what replies call: fire and forget, so that no reply waits for the engine's step."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from coda_engine.policy.tool_use import ToolUse
from coda_engine.vllm_adapter.compat import Gate
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.tools.replies import ReplyWatch

TURN_ENDED = "coda_turn_ended"
TOOLS_SEEN = "coda_tools_seen"
MAX_OUTSTANDING = 256

SERVING_OBJECTS = ("openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages")
"""Where vLLM keeps what serves chat/completions, responses and messages."""

Call = Callable[..., Awaitable[Any]]
"""Calls a method of EngineCore between two of its steps: name, arguments."""


class TurnReports:
    """Sends reports; beyond 256 that the engine has not taken yet, new ones are dropped and counted.

    Attributes:
        dropped: Reports that were not sent.
    """

    def __init__(self, call: Call) -> None:
        self.dropped = 0
        self._call = call
        self._outstanding: set[asyncio.Task[None]] = set()

    def __call__(self, session_id: str, uses: Sequence[ToolUse]) -> None:
        """Send the end of a turn."""
        if len(self._outstanding) >= MAX_OUTSTANDING:
            self.dropped += 1
            return
        report = self._send(session_id, [[use.name, use.kind.value] for use in uses])
        task = asyncio.get_running_loop().create_task(report)
        self._outstanding.add(task)
        task.add_done_callback(self._outstanding.discard)

    async def _send(self, session_id: str, uses: list[list[str]]) -> None:
        try:
            await self._call(TURN_ENDED, session_id, uses)
        except Exception as error:
            logger.warning("coda: the engine was not told of a turn's end: %s", error)


async def watch_replies(state: Any, call: Call, gate: Gate) -> None:
    """Watch the replies of every serving object in ``state`` and tell the engine whether that works.

    Args:
        state: The application's state, after vLLM has set it up.
        call: Calls EngineCore.
        gate: Whether replies may be watched on this vLLM.
    """
    try:
        problem = _watch(state, TurnReports(call)) if gate.open else gate.detail
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    logger.info("coda: tools of replies are %s", f"not known: {problem}" if problem else "watched")
    try:
        await call(TOOLS_SEEN, problem)
    except Exception as error:
        logger.warning("coda: the engine does not know whether tools of replies are seen: %s", error)


def _watch(state: Any, reports: TurnReports) -> str:
    """Return why nothing is watched, and the remedy; "" when it is."""
    watch = ReplyWatch(reports)
    serving = [getattr(state, name, None) for name in SERVING_OBJECTS]
    watched = [watch.install(one) for one in serving if one is not None and _parses_tools(one)]
    return "" if any(watched) else "no tool parser is configured; set --enable-auto-tool-choice and --tool-call-parser"


def _parses_tools(serving: Any) -> bool:
    parser_class = getattr(serving, "parser_cls", None) or getattr(serving, "parser", None)
    return getattr(parser_class, "tool_parser_cls", None) is not None
