"""Slots for new pages: free ones, then victims in the policy's order."""

from collections.abc import Collection
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from coda_engine.shadow.eviction import EvictionPolicy, first_out
from coda_engine.shadow.records import SlotState
from coda_engine.shadow.session import IndexSession

_BATCH = 256

_Protected = tuple[Collection[bytes], Collection[bytes]]
"""Keys that are no victims: those asked for, and the rest of their context, which may be long and is not copied."""


class Room:
    """Finds room; one pass over all pages serves many evictions.

    Queued victims that were used since, or are none any more, drop out by their age. Pages that come later are younger
    than those queued, so that the order is the policy's as if all were sorted each time; only a page that was pinned
    during the pass waits for the next one.
    """

    def __init__(self, session: IndexSession, policy: EvictionPolicy) -> None:
        self._session = session
        self._mirror = session.mirror
        self._policy = policy
        self._queued: NDArray[np.int64] = np.empty(0, np.int64)
        self._queued_ages: NDArray[np.uint64] = np.empty(0, np.uint64)

    def find(self, count: int, protected: _Protected) -> list[int] | None:
        """Return ``count`` slots that are free or may be evicted, none of a ``protected`` key; None if too few are.

        Protected keys are a whole context's: they are asked for one by one, and only where something is evicted.
        To be called with the index locked; what is returned is as the index says this moment.
        """
        slots = self._find(count, protected)
        if slots is None:
            self._session.sweep()
            slots = self._find(count, protected)
        return slots

    def _find(self, count: int, protected: _Protected) -> list[int] | None:
        slots = [slot for slot in list(islice(self._mirror.free, count)) if self._session.confirm(slot)]
        if len(slots) < count:
            victims = self._victims(count - len(slots), protected)
            slots += [slot for slot in victims if self._session.confirm(slot)]
        return slots if len(slots) == count else None

    def _victims(self, count: int, protected: _Protected) -> list[int]:
        still = self._are_evictable(self._queued) & (self._ages(self._queued) == self._queued_ages)
        self._queued, self._queued_ages = self._queued[still], self._queued_ages[still]
        chosen = self._first(count, protected)
        if len(chosen) < count:
            slots = self._mirror.slots_in(SlotState.READY)
            slots = slots[self._are_evictable(slots)]
            most = max(_BATCH, count + sum(map(len, protected)))
            self._queued, self._queued_ages = first_out(slots, self._ages(slots), most)
            chosen = self._first(count, protected)
        return chosen

    def _first(self, count: int, protected: _Protected) -> list[int]:
        keys, (asked_for, context) = self._mirror.keys, protected
        queued = self._queued.tolist()
        return list(
            islice((slot for slot in queued if keys[slot] not in asked_for and keys[slot] not in context), count)
        )

    def _ages(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._policy.ages(self._session.file.last_uses[slots], self._mirror.published_ticks[slots])

    def _are_evictable(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._mirror.are_in(slots, SlotState.READY) & ~self._session.are_pinned(slots)
