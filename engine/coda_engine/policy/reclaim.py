"""HBM reclaim: whose cached KV blocks are given up first within the victim window (paper section 6).

An order only ranks idle sessions and says how their blocks follow each other. Which blocks may be ranked at all
(free, of one session alone, published where the order asks for it) is the adapter's to establish; everything
else keeps the engine's native least-recently-used order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from coda_engine.policy.tool_gaps import HUMAN_PRIOR, TOOL_PRIOR
from coda_engine.policy.tool_use import ToolUse


@dataclass(frozen=True, slots=True)
class Cycle:
    """One round of a session: the engine's part and the gap after it, seconds."""

    reasoning_s: float
    acting_s: float


@dataclass(frozen=True, slots=True)
class IdleSession:
    """A session none of whose requests is in the engine.

    Attributes:
        idle_s: Since its last turn ended, seconds.
        tools: What the last reply called; empty: it was a final answer; None: nobody said.
        reasoning_s: The engine's part of the round that is going on, seconds.
        cycles: Rounds before that one, oldest first.
    """

    idle_s: float
    tools: tuple[ToolUse, ...] | None = None
    reasoning_s: float = 0.0
    cycles: Sequence[Cycle] = ()


class GapModel(Protocol):
    """Expected rest of a gap."""

    def mean_rest_s(self, use: ToolUse, elapsed_s: float) -> float:
        """Return how much longer a gap after ``use`` lasts on average, seconds."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPrior:
    """The paper's mode: nothing is fitted online."""

    def mean_rest_s(self, use: ToolUse, elapsed_s: float) -> float:
        """Return the prior's expected rest for the kind of tool, seconds."""
        return TOOL_PRIOR[use.kind].mean_rest_s(elapsed_s)


Place = tuple[float, int, int]
"""Where a block comes among the window's candidates: smaller goes first."""


class VictimOrder(Protocol):
    """Ranks the window's candidates."""

    @property
    def needs_publication(self) -> bool:
        """Whether only blocks that the CPU shadow holds may be ranked."""
        ...

    @property
    def needs_tools(self) -> bool:
        """Whether it ranks by what replies call."""
        ...

    def rank(self, session: IdleSession) -> float | None:
        """Return how strongly the session's blocks are to go (greater: sooner); None: native order."""
        ...

    def place(self, rank: float, session_position: int, position: int, depth: int) -> Place:
        """Return a block's place.

        Args:
            rank: Its session's rank.
            session_position: Where the session's first block lies in the window, from the LRU end.
            position: Where the block itself lies.
            depth: The block's number in its session's chain.
        """
        ...


@dataclass(frozen=True, slots=True)
class ToolAware:
    """Coda's order (paper section 6): longest predicted idle session first, its deepest block first.

    The expected rest is the integral of S beyond the elapsed time over S there, from the curve of the tool that
    the session waits for; of parallel tools the longest counts (a lower bound of their maximum's mean); after a
    final answer the human's curve. Deepest first, because without a block those below it cannot be reached.
    """

    gaps: GapModel = FixedPrior()
    needs_publication: bool = True
    needs_tools: bool = True

    def rank(self, session: IdleSession) -> float | None:
        """Return the expected rest of the session's gap, seconds."""
        if session.tools is None:
            return None
        if not session.tools:
            return HUMAN_PRIOR.mean_rest_s(session.idle_s)
        return _longest_rest_s(self.gaps, session.tools, session.idle_s)

    def place(self, rank: float, session_position: int, position: int, depth: int) -> Place:
        """Return the place: by rank, sessions one after the other, deepest first."""
        return (-rank, session_position, -depth)


@dataclass(frozen=True, slots=True)
class CacheWise:
    """CacheWise's order: largest expected rest of the tool first, a human's gap never ends; then LRU.

    It knows no shadow, so it asks for no publication.
    """

    gaps: GapModel = FixedPrior()
    needs_publication: bool = False
    needs_tools: bool = True

    def rank(self, session: IdleSession) -> float | None:
        """Return the expected rest of the session's gap, seconds; infinity after a final answer."""
        if session.tools is None:
            return None
        return _longest_rest_s(self.gaps, session.tools, session.idle_s) if session.tools else inf

    def place(self, rank: float, session_position: int, position: int, depth: int) -> Place:
        """Return the place: by rank, then least recently used."""
        return (-rank, position, 0)


@dataclass(frozen=True, slots=True)
class Idleness:
    """MORI's order: the share of its last rounds that a session spent away from the engine, greatest first.

    iota = T_act / (T_reason + T_act) over the last ``rounds``, the one that is going on included. It needs times
    only, no tools, and knows no shadow.
    """

    rounds: int = 5
    needs_publication: bool = False
    needs_tools: bool = False

    def rank(self, session: IdleSession) -> float | None:
        """Return iota, 0 to 1."""
        earlier = session.cycles[max(0, len(session.cycles) - self.rounds + 1) :]
        acting_s = session.idle_s + sum(cycle.acting_s for cycle in earlier)
        total_s = acting_s + session.reasoning_s + sum(cycle.reasoning_s for cycle in earlier)
        return acting_s / total_s if total_s > 0 else 0.0

    def place(self, rank: float, session_position: int, position: int, depth: int) -> Place:
        """Return the place: by rank, then least recently used."""
        return (-rank, position, 0)


def _longest_rest_s(gaps: GapModel, tools: Sequence[ToolUse], elapsed_s: float) -> float:
    return max(gaps.mean_rest_s(use, elapsed_s) for use in tools)
