"""What each session does between its turns: waits for a tool, for a person, or nobody knows.

A gap opens when a session's last request leaves the engine and closes when its next one arrives. The API
process tells what the reply called, shortly before or after the gap opens (:mod:`..tools`).
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coda_engine.policy.reclaim import Cycle, IdleSession
from coda_engine.policy.tool_gaps import TOOL_PRIOR, GapCounts, SurvivalCurve
from coda_engine.policy.tool_use import ToolUse

MAX_SESSIONS = 8_192
MAX_TOOLS = 8
_KEPT_CYCLES = 8
_MAX_LEARNT = 256
_GAPS_PER_FIT = 8


@dataclass(slots=True)
class _Session:
    live: int = 0
    ended_at_s: float = 0.0
    tools: tuple[ToolUse, ...] | None = None
    reasoning_s: float = 0.0
    cycles: deque[Cycle] = field(default_factory=lambda: deque(maxlen=_KEPT_CYCLES))


@dataclass(slots=True)
class _Live:
    session: str
    started_at_s: float | None = None


class SessionGaps:
    """At most ``max_sessions`` sessions; of those that have no request in the engine the oldest give way.

    Attributes:
        turns: Ended turns that the API process told of, by what follows: ``Tool`` or ``Human``.
        closed: Told of each gap that closes: what the session waited for and how long, seconds.

    Args:
        clock: Monotonic, seconds.
    """

    def __init__(self, clock: Callable[[], float], max_sessions: int = MAX_SESSIONS) -> None:
        self.turns = {"Tool": 0, "Human": 0}
        self.closed: Callable[[tuple[ToolUse, ...], float], None] | None = None
        self._clock = clock
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._live: dict[str, _Live] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def arrived(self, request_id: str, session: str, ready_age_s: float = 0.0) -> None:
        """Note that a request of the session has come; the tool's results have been there for ``ready_age_s``."""
        if not session or request_id in self._live:
            return
        self._live[request_id] = _Live(session)
        record = self._record(session)
        if record.live == 0 and record.ended_at_s > 0:
            gap_s = max(0.0, self._clock() - record.ended_at_s - ready_age_s)
            record.cycles.append(Cycle(record.reasoning_s, gap_s))
            if self.closed is not None and record.tools is not None:
                self.closed(record.tools, gap_s)
            record.reasoning_s = 0.0
        record.live += 1
        record.tools = None

    def started(self, request_id: str) -> None:
        """Note that the request runs from now on (later calls change nothing)."""
        live = self._live.get(request_id)
        if live is not None and live.started_at_s is None:
            live.started_at_s = self._clock()

    def over(self, request_id: str) -> None:
        """Note that the request leaves the engine."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        record, now_s = self._record(live.session), self._clock()
        record.live = max(0, record.live - 1)
        record.ended_at_s = now_s
        if live.started_at_s is not None:
            record.reasoning_s += now_s - live.started_at_s

    def turn_ended(self, session: str, tools: tuple[ToolUse, ...]) -> None:
        """Note what a reply called; nothing: it was a final answer.

        A final answer beside a reply that called tools (a title, a summary) does not hide them.
        """
        if not session:
            return
        self.turns["Tool" if tools else "Human"] += 1
        record = self._record(session)
        if record.ended_at_s == 0.0:
            record.ended_at_s = self._clock()
        if tools or not record.tools:
            record.tools = tools[:MAX_TOOLS]

    def is_active(self, session: str) -> bool:
        """Return whether the session has a request in the engine."""
        record = self._sessions.get(session)
        return record is not None and record.live > 0

    def idle_since_s(self, session: str) -> float | None:
        """Return when the session's last request left the engine (the clock's seconds); None while one is in it."""
        record = self._sessions.get(session)
        return record.ended_at_s if record is not None and record.live == 0 else None

    def idle(self, session: str) -> IdleSession | None:
        """Return what the session does; None while it is active or unknown."""
        record = self._sessions.get(session)
        if record is None or record.live > 0 or record.ended_at_s == 0.0:
            return None
        idle_s = max(0.0, self._clock() - record.ended_at_s)
        return IdleSession(idle_s, record.tools, record.reasoning_s, tuple(record.cycles))

    def waits_for(self, session: str) -> tuple[str, float] | None:
        """Return the tool that the session waits for and how long already, seconds; None: for none."""
        record = self._sessions.get(session)
        if record is None or record.live > 0 or not record.tools:
            return None
        return record.tools[0].label, max(0.0, self._clock() - record.ended_at_s)

    def open_by_kind(self) -> dict[str, float]:
        """Return how many sessions wait for a tool now, by the kind of the first that they wait for."""
        waiting = (record.tools[0].kind.value for record in self._sessions.values() if record.tools and not record.live)
        return {kind: float(count) for kind, count in Counter(waiting).items()}

    def _record(self, session: str) -> _Session:
        record = self._sessions.get(session)
        if record is None:
            record = self._sessions[session] = _Session()
            self._make_room()
        else:
            self._sessions.move_to_end(session)
        return record

    def _make_room(self) -> None:
        for _ in range(len(self._sessions)):
            if len(self._sessions) <= self._max_sessions:
                return
            oldest = next(iter(self._sessions))
            if self._sessions[oldest].live > 0 or len(self._sessions) == 1:
                self._sessions.move_to_end(oldest)
            else:
                del self._sessions[oldest]


class LearntGaps:
    """Curves fitted to the gaps of this engine, at most 256 tools; the longest unused give way (an extension)."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[GapCounts, SurvivalCurve, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def learn(self, tools: tuple[ToolUse, ...], gap_s: float) -> None:
        """Take in a closed gap; of parallel tools nobody knows which took how long, so none learns."""
        if len(tools) != 1:
            return
        (use,) = tools
        prior = TOOL_PRIOR[use.kind]
        counts, curve, pending = self._counts.get(use.label, (GapCounts(), prior, 0))
        counts = counts.seen(gap_s)
        pending += 1
        if pending >= _GAPS_PER_FIT:
            curve, pending = counts.curve(prior), 0
        self._counts[use.label] = (counts, curve, pending)
        self._counts.move_to_end(use.label)
        while len(self._counts) > _MAX_LEARNT:
            self._counts.popitem(last=False)

    def mean_rest_s(self, use: ToolUse, elapsed_s: float) -> float:
        """Return how much longer a gap after ``use`` lasts on average, as learnt or by the prior, seconds."""
        learnt = self._counts.get(use.label)
        return (learnt[1] if learnt is not None else TOOL_PRIOR[use.kind]).mean_rest_s(elapsed_s)
