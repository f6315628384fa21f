"""Which published pages make room for new ones: pure values, over what the index knows of each page.

Ticks are one scale for all processes; larger is later. The deeper a page in its prefix, the older its ticks within one
publication or use, so that every policy gives up the end of a prefix before its beginning.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EvictionPolicyName(StrEnum):
    """The orders to choose from."""

    LRU = "lru"
    FIFO = "fifo"


class EvictionPolicy(Protocol):
    """An order in which pages are given up."""

    def ages(self, last_use_ticks: NDArray[np.uint64], published_ticks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return for each page the tick by which it is ordered: the smallest goes first.

        Args:
            last_use_ticks: When each was last published, pinned or touched.
            published_ticks: When each was published.
        """
        ...


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used first."""

    def ages(self, last_use_ticks: NDArray[np.uint64], published_ticks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the last uses."""
        return last_use_ticks


@dataclass(frozen=True, slots=True)
class Fifo:
    """First published first, however often it was used since."""

    def ages(self, last_use_ticks: NDArray[np.uint64], published_ticks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the publications."""
        return published_ticks


def eviction_policy(name: EvictionPolicyName) -> EvictionPolicy:
    """Return the policy of that name."""
    match name:
        case EvictionPolicyName.LRU:
            return Lru()
        case EvictionPolicyName.FIFO:
            return Fifo()


def first_out(
    slots: NDArray[np.int64], ages: NDArray[np.uint64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the ``count`` slots (or all, if there are fewer) of the smallest ages, in their order, and their ages."""
    if count < len(slots):
        chosen = np.argpartition(ages, count)[:count]
        slots, ages = slots[chosen], ages[chosen]
    order = np.argsort(ages, kind="stable")
    return slots[order], ages[order]
