"""What starting a resumed request costs, by where its session's KV state was found (paper section 3.1).

A request is *resumed* when its session had an earlier one in this engine. Its startup begins when state
admission lets it in (its first blocks are allocated: a restore or a prefill begins) and ends with its first
token; waiting before that is not part of it. The path is told by the tokens that the session had before: found
in HBM, restored from the CPU shadow or computed again, whichever are most. What the request adds to them has to
be computed on any path.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from coda_engine.contract.reasons import PreparationPath
from coda_engine.vllm_adapter.telemetry.histogram import Histogram, HistogramState

STARTUP_BOUNDS_S = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0)
"""Upper bounds of the startup histograms, seconds; the paper's medians lie between 0.3 and 9, its p95 below 46."""

MAX_SESSIONS = 8_192


@dataclass(slots=True)
class _Startup:
    path: PreparationPath | None
    began_s: float


class StartupCosts:
    """Follows requests from their admission to their first token; bounded by live requests and ``max_sessions``.

    Args:
        clock: Monotonic, seconds.
        max_sessions: Most sessions whose length is remembered; those unused for longest give way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_sessions: int = MAX_SESSIONS) -> None:
        self._clock = clock
        self._max_sessions = max_sessions
        self._histograms = {path: Histogram(STARTUP_BOUNDS_S) for path in PreparationPath}
        self._lengths: OrderedDict[str, int] = OrderedDict()
        self._starting: dict[str, _Startup] = {}

    @property
    def starting(self) -> list[str]:
        """Ids of the requests that have been admitted and have no token yet."""
        return list(self._starting)

    def admitted(self, request_id: str, session: str, hbm_tokens: int, shadow_tokens: int, prompt_tokens: int) -> None:
        """Note that a request was let in; a second time (after a preemption) changes nothing.

        Args:
            request_id: The engine's request id.
            session: Its session's key; "" when it belongs to none.
            hbm_tokens: Tokens of its prompt that were found in HBM.
            shadow_tokens: Tokens that are restored.
            prompt_tokens: All of them.
        """
        if request_id in self._starting:
            return
        earlier = self._lengths.get(session) if session else None
        path = None
        if earlier is not None:
            known = min(earlier, prompt_tokens)
            found = min(hbm_tokens, known)
            restored = min(shadow_tokens, known - found)
            path = PreparationPath.of(found, restored, known - found - restored)
        self._starting[request_id] = _Startup(path, self._clock())

    def first_token(self, request_id: str) -> None:
        """Note that the request has its first token."""
        startup = self._starting.pop(request_id, None)
        if startup is not None and startup.path is not None:
            self._histograms[startup.path].observe(self._clock() - startup.began_s)

    def over(self, request_id: str, session: str, tokens: int) -> None:
        """Note that a request has left with this many tokens; without a token its startup counts for nothing."""
        self._starting.pop(request_id, None)
        if session:
            self._lengths[session] = tokens
            self._lengths.move_to_end(session)
            while len(self._lengths) > self._max_sessions:
                self._lengths.popitem(last=False)

    def states(self) -> dict[PreparationPath, HistogramState]:
        """Return the histogram of each path, seconds."""
        return {path: histogram.state() for path, histogram in self._histograms.items()}
