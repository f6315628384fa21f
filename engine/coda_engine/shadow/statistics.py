"""Figures of a shadow store, for telemetry."""

from dataclasses import dataclass


@dataclass(slots=True)
class ShadowCounters:
    """What one process did since it opened the index; the sum over the engines of a node is the node's.

    Attributes:
        published: Pages that it published.
        evicted: Published pages that it evicted to make room for its own.
        poisoned: Pages that it poisoned.
        abandoned: Reservations that it gave back unpublished.
        lost: Reservations of its own that were gone at publication (index damaged in between).
        reclaimed_from_dead: Reservations of dead processes whose slots it freed.
        damaged: Index records that it found damaged, and restored or freed.
        repairs: Times that it repaired the index after another process died in the middle of a change.
        lock_timeouts: Operations that it put off or refused because the index stayed locked too long.
    """

    published: int = 0
    evicted: int = 0
    poisoned: int = 0
    abandoned: int = 0
    lost: int = 0
    reclaimed_from_dead: int = 0
    damaged: int = 0
    repairs: int = 0
    lock_timeouts: int = 0


@dataclass(frozen=True, slots=True)
class ShadowStatistics:
    """A shadow's pages now, and the counters of this process (see ``ShadowCounters``).

    ``used_pages + writing_pages + poisoned_pages + free_pages == capacity_pages`` always.

    Attributes:
        capacity_pages: Slots of the layout.
        used_pages: Published pages, by any process.
        writing_pages: Reserved pages that nobody has published yet, by any process.
        poisoned_pages: Withdrawn pages that some reader still has pinned.
        free_pages: The rest.
        pinned_pages: Distinct pages that this process has pinned.
    """

    capacity_pages: int
    used_pages: int
    writing_pages: int
    poisoned_pages: int
    free_pages: int
    pinned_pages: int
    published: int
    evicted: int
    poisoned: int
    abandoned: int
    lost: int
    reclaimed_from_dead: int
    damaged: int
    repairs: int
    lock_timeouts: int
