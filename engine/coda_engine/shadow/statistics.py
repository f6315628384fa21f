"""Figures of a shadow store, for telemetry."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShadowStatistics:
    """A shadow's pages now, and what this process did since it opened the index.

    The counters are this process's own: the sum over the engines of a node is the node's.
    ``used_pages + writing_pages + poisoned_pages + free_pages == capacity_pages`` always.

    Attributes:
        capacity_pages: Slots of the layout.
        used_pages: Published pages, by any process.
        writing_pages: Reserved pages that nobody has published yet, by any process.
        poisoned_pages: Poisoned pages that some reader still has pinned.
        free_pages: The rest.
        pinned_pages: Distinct pages that this process has pinned.
        published: Pages that this process published.
        evicted: Published pages that this process evicted for its own.
        poisoned: Pages that this process poisoned.
        abandoned: Reservations that this process gave back unpublished.
        lost: Reservations of this process that were gone at publication (never to be expected).
        reclaimed_from_dead: Reservations of dead processes whose slots this process freed.
        damaged: Index records that this process found damaged and freed.
        repairs: Times that this process repaired the index after another one died in the middle of a change.
        lock_timeouts: Operations that were put off or refused because the index stayed locked too long.
    """

    capacity_pages: int
    used_pages: int
    writing_pages: int
    poisoned_pages: int
    free_pages: int
    pinned_pages: int
    published: int = 0
    evicted: int = 0
    poisoned: int = 0
    abandoned: int = 0
    lost: int = 0
    reclaimed_from_dead: int = 0
    damaged: int = 0
    repairs: int = 0
    lock_timeouts: int = 0
