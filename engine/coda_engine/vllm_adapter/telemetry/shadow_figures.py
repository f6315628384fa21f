"""The CPU shadow in figures, for snapshot and metrics."""

from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler

from coda_engine.contract.reasons import ShadowEvent
from coda_engine.shadow import ShadowStatistics
from coda_engine.vllm_adapter.shadow.connector import CodaShadowConnector
from coda_engine.vllm_adapter.shadow.manager import ShadowCounters


@dataclass(frozen=True, slots=True)
class ShadowFigures:
    """Bytes and pages; all ranks' pages of one KV block count once, their bytes together.

    Attributes:
        used_bytes: Published, by any engine that shares the shadow.
        capacity_bytes: Room; 0 while there is no shadow.
        capacity_pages: The same in pages.
        outstanding_restore_bytes: Of restores that have been ordered and have not ended.
        pages_by_state: Pages now: used, writing, poisoned, pinned (by this engine), free.
        events: Pages of this engine since its start, by ShadowEvent.
        counters: What came of this engine's transfers.
        repairs: Times that the index was repaired after another process had died in the middle of a change.
        lock_timeouts: Operations put off or refused because the index stayed locked too long.
    """

    used_bytes: int = 0
    capacity_bytes: int = 0
    capacity_pages: int = 0
    outstanding_restore_bytes: int = 0
    pages_by_state: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    counters: ShadowCounters = field(default_factory=ShadowCounters)
    repairs: int = 0
    lock_timeouts: int = 0


NO_SHADOW = ShadowFigures()


class ShadowReader:
    """Reads a scheduler's shadow; what the index counted is kept when the shadow closes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last: ShadowStatistics | None = None

    def figures(self) -> ShadowFigures:
        """Return the figures as of now."""
        connector = self._scheduler.connector
        if not isinstance(connector, CodaShadowConnector):
            return NO_SHADOW
        manager, index = connector.manager, connector.manager.index
        if index is not None:
            self._last = index.statistics()
        last, page_bytes = self._last, manager.page_bytes_all_ranks
        if last is None:
            return ShadowFigures(events=_events(manager.counters, None), counters=manager.counters)
        return ShadowFigures(
            used_bytes=last.used_pages * page_bytes if index is not None else 0,
            capacity_bytes=last.capacity_pages * page_bytes if index is not None else 0,
            capacity_pages=last.capacity_pages if index is not None else 0,
            outstanding_restore_bytes=manager.outstanding_restore_bytes,
            pages_by_state=_states(last) if index is not None else {},
            events=_events(manager.counters, last),
            counters=manager.counters,
            repairs=last.repairs,
            lock_timeouts=last.lock_timeouts,
        )


def _states(last: ShadowStatistics) -> dict[str, int]:
    return {
        "used": last.used_pages,
        "writing": last.writing_pages,
        "poisoned": last.poisoned_pages,
        "pinned": last.pinned_pages,
        "free": last.free_pages,
    }


def _events(counters: ShadowCounters, last: ShadowStatistics | None) -> dict[str, int]:
    events = {
        ShadowEvent.PUBLISHED: counters.published,
        ShadowEvent.RESTORED: counters.restored,
        ShadowEvent.VANISHED: counters.vanished,
        ShadowEvent.UNWRITTEN: counters.unwritten,
        ShadowEvent.NO_SPACE: counters.no_space,
    }
    if last is not None:
        events |= {
            ShadowEvent.EVICTED: last.evicted,
            ShadowEvent.POISONED: last.poisoned,
            ShadowEvent.LOST: last.lost,
            ShadowEvent.RECLAIMED: last.reclaimed_from_dead,
            ShadowEvent.DAMAGED: last.damaged,
        }
    return {event.value: count for event, count in events.items()}
