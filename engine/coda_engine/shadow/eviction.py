"""Which published pages make room for new ones: pure values, over what the index knows of each page."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EvictionPolicyName(StrEnum):
    """The orders to choose from."""

    LRU = "lru"
    FIFO = "fifo"


@dataclass(frozen=True, slots=True)
class EvictablePages:
    """Published pages that nobody has pinned; one element of each array for one page.

    Attributes:
        slots: Slot numbers.
        last_use_ticks: When each was last published, pinned or touched; larger is later.
        published_ticks: When each was published, on the same scale.
    """

    slots: NDArray[np.int64]
    last_use_ticks: NDArray[np.uint64]
    published_ticks: NDArray[np.uint64]


class EvictionPolicy(Protocol):
    """An order in which pages are given up."""

    def victims(self, pages: EvictablePages, count: int) -> list[int]:
        """Return at most ``count`` slots, the first to go first."""
        ...


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used first. Deeper pages of one prefix are older by the index's ticks, so they go first."""

    def victims(self, pages: EvictablePages, count: int) -> list[int]:
        """Return the least recently used slots."""
        return _smallest(pages.slots, pages.last_use_ticks, count)


@dataclass(frozen=True, slots=True)
class Fifo:
    """First published first, however often it was used since."""

    def victims(self, pages: EvictablePages, count: int) -> list[int]:
        """Return the slots that were published first."""
        return _smallest(pages.slots, pages.published_ticks, count)


def eviction_policy(name: EvictionPolicyName) -> EvictionPolicy:
    """Return the policy of that name."""
    match name:
        case EvictionPolicyName.LRU:
            return Lru()
        case EvictionPolicyName.FIFO:
            return Fifo()


def _smallest(slots: NDArray[np.int64], ticks: NDArray[np.uint64], count: int) -> list[int]:
    if count < len(slots):
        chosen = np.argpartition(ticks, count)[:count]
        slots, ticks = slots[chosen], ticks[chosen]
    return [int(slot) for slot in slots[np.argsort(ticks, kind="stable")]]
