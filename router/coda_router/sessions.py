"""Where each session was placed last: bounded in number and age, in flat memory."""

from collections.abc import Iterable
from dataclasses import dataclass

from coda_router.recency import RecencyTable

EVICTION_GRACE_S = 2.0
"""Session tables are about a second old: one that lacks a session placed later than this says nothing of it."""

NOTHING_LEFT = ""
"""Incarnation of a home that has evicted its session; no worker's."""

_MOST_TOKENS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Home:
    """A session's last placement.

    Attributes:
        worker: The worker's name.
        incarnation: The worker's incarnation then; another one now means that nothing is resident any more.
            :data:`NOTHING_LEFT` where the worker itself says so.
        placed_at_s: When, event loop's time in seconds.
        context_tokens: Estimate of the context that the session had then, tokens.
        has_tools: Whether the request offered tools to the model.
    """

    worker: str
    incarnation: str
    placed_at_s: float
    context_tokens: int = 0
    has_tools: bool = False


class SessionMap:
    """Session key to :class:`Home`; the least recently placed goes first.

    A session costs about 49 bytes (``coda bench router --case sessions`` measures it), taken as sessions come.
    Two sessions whose keys have the same 64-bit hash share a home, which is a preference only.

    Args:
        max_sessions: Most sessions remembered; >= 1.
        ttl_s: Seconds after which a session that was not placed is forgotten.
    """

    def __init__(self, max_sessions: int, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._table = RecencyTable(max_sessions)
        self._placed_at_s = self._table.float_column()
        self._places = self._table.int_column("I")
        self._context_tokens = self._table.int_column("I")
        self._has_tools = self._table.int_column("B")
        self._known = _Places()

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: str, now_s: float) -> Home | None:
        """Return where the session was placed last; None if never, or too long ago."""
        slot = self._table.find(hash(key))
        if not slot:
            return None
        placed_at_s = self._placed_at_s[slot]
        if now_s - placed_at_s > self._ttl_s:
            self._forget(slot)
            return None
        worker, incarnation = self._known.names(self._places[slot])
        return Home(worker, incarnation, placed_at_s, self._context_tokens[slot], bool(self._has_tools[slot]))

    def put(self, key: str, home: Home) -> None:
        """Remember a placement and drop what is too old or too much."""
        table, key_hash = self._table, hash(key)
        place = self._known.take(home.worker, home.incarnation)
        slot = table.find(key_hash)
        if slot:
            table.touch(slot)
            self._known.release(self._places[slot])
        else:
            if table.is_full:
                self._forget(table.oldest)
            slot = table.add(key_hash)
        self._placed_at_s[slot] = home.placed_at_s
        self._places[slot] = place
        self._context_tokens[slot] = min(home.context_tokens, _MOST_TOKENS)
        self._has_tools[slot] = home.has_tools
        oldest = table.oldest
        if home.placed_at_s - self._placed_at_s[oldest] > self._ttl_s:
            self._forget(oldest)

    def mark_evicted(self, worker: str, key_hashes: Iterable[int], now_s: float) -> None:
        """Remember of sessions that their home has nothing left of them.

        Args:
            worker: Who has nothing left of them.
            key_hashes: ``hash`` of each session's key.
            now_s: Event loop's time, seconds.
        """
        for key_hash in key_hashes:
            slot = self._table.find(key_hash)
            if not slot or now_s - self._placed_at_s[slot] <= EVICTION_GRACE_S:
                continue
            if self._known.names(self._places[slot])[0] == worker:
                self._known.release(self._places[slot])
                self._places[slot] = self._known.take(worker, NOTHING_LEFT)

    def _forget(self, slot: int) -> None:
        self._known.release(self._places[slot])
        self._table.remove(slot)


class _Places:
    """Numbers for (worker, incarnation), each kept for as long as a session is there."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._names: list[tuple[str, str]] = []
        self._uses: list[int] = []
        self._free: list[int] = []

    def names(self, number: int) -> tuple[str, str]:
        """Return worker and incarnation."""
        return self._names[number]

    def take(self, worker: str, incarnation: str) -> int:
        """Return the place's number, with one more user."""
        place = (worker, incarnation)
        number = self._numbers.get(place)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._names[number], self._uses[number] = place, 0
            else:
                number = len(self._names)
                self._names.append(place)
                self._uses.append(0)
            self._numbers[place] = number
        self._uses[number] += 1
        return number

    def release(self, number: int) -> None:
        """Take note that one user less needs the number."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self._names[number]]
            self._free.append(number)
