"""Where each session was placed last: bounded in number and age."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

EVICTION_GRACE_S = 2.0
"""Session tables are about a second old: one that lacks a session placed later than this says nothing of it."""


@dataclass(frozen=True, slots=True)
class Home:
    """A session's last placement.

    Attributes:
        worker: The worker's name.
        incarnation: The worker's incarnation then; another one now means that nothing is resident any more.
        placed_at_s: When, event loop's time in seconds.
        context_tokens: Estimate of the context that the session had then, tokens.
    """

    worker: str
    incarnation: str
    placed_at_s: float
    context_tokens: int = 0


class SessionMap:
    """Session key to :class:`Home`; the least recently used goes first.

    Args:
        max_sessions: Most sessions remembered; about 0.5 KiB each.
        ttl_s: Seconds after which a session that was not used is forgotten.
    """

    def __init__(self, max_sessions: int, ttl_s: float) -> None:
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def get(self, key: str, now_s: float) -> Home | None:
        """Return where the session was placed last; None if never, or too long ago."""
        home = self._homes.get(key)
        if home is not None and now_s - home.placed_at_s > self._ttl_s:
            del self._homes[key]
            return None
        return home

    def put(self, key: str, home: Home) -> None:
        """Remember a placement and drop what is too old or too much."""
        self._homes[key] = home
        self._homes.move_to_end(key)
        while len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)
        oldest = next(iter(self._homes))
        if home.placed_at_s - self._homes[oldest].placed_at_s > self._ttl_s:
            del self._homes[oldest]

    def forget_evicted(self, worker: str, keys: Iterable[str], now_s: float) -> None:
        """Forget sessions of which their home has nothing left."""
        for key in keys:
            home = self._homes.get(key)
            if home is not None and home.worker == worker and now_s - home.placed_at_s > EVICTION_GRACE_S:
                del self._homes[key]
