"""The scheduler's half: which key is on which page, who writes it and who reads it, for all engines of a node."""

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Self, TypeVar

from coda_engine.shadow.eviction import EvictionPolicy, EvictionPolicyName, eviction_policy
from coda_engine.shadow.index_file import IndexFile
from coda_engine.shadow.layout import MAX_KEY_BYTES, PageRef, ShadowLayout
from coda_engine.shadow.locks import call_in_forked_child
from coda_engine.shadow.records import SlotRecord, SlotState
from coda_engine.shadow.room import Room
from coda_engine.shadow.session import IndexSession
from coda_engine.shadow.statistics import ShadowStatistics

ChangeListener = Callable[[bytes, bool], None]
"""Called with a key and whether it is ready now (True) or has vanished (False)."""

T = TypeVar("T")


class ShadowIndex:
    """One process's view of the index and its way to change it. One thread uses it; many processes may.

    Every change is made under one lock that the kernel releases when its holder dies. No call waits for that lock
    longer than ``lock_wait_s``: what cannot be done then is refused (``reserve``, ``pin``) or done at a later call
    (``publish``, ``abandon``, ``poison``). After a fork the child's copy is closed. A closed index raises ValueError.
    """

    def __init__(self, session: IndexSession, policy: EvictionPolicy) -> None:
        self._session = session
        self._mirror = session.mirror
        self._room = Room(session, policy)
        self._random = Random(os.urandom(16))  # noqa: S311 - tells reservations apart, guards nothing
        self._listeners: list[ChangeListener] = []
        self._put_off: deque[Callable[[], None]] = deque()
        self._is_open = True
        self._mirror.changes.clear()
        call_in_forked_child(self._forget)

    @classmethod
    def open(
        cls,
        folder: Path,
        layout: ShadowLayout,
        *,
        eviction: EvictionPolicyName,
        clock: Callable[[], float],
        lock_wait_s: float = 0.05,
    ) -> Self:
        """Return the index of ``layout`` in ``folder``; whoever comes first makes folder and files.

        Pages that were published before are there again, also after all processes have died.

        Args:
            folder: Made with mode 0700 if absent; one CodaCluster's own.
            layout: Engines with an equal one share the pages.
            eviction: How this process chooses whom to evict.
            clock: Monotonic seconds, the same for all processes (``time.monotonic``); it may step back.
            lock_wait_s: Longest wait for another process's change, seconds.

        Raises:
            ShadowError: Too little space, a folder or file of another owner or open to others, a file system without
                the locks that the store needs, too many engines, a lock that nobody gives back.
        """
        file = IndexFile.open(folder, layout)
        session = IndexSession(file, layout.slots, clock, lock_wait_s)
        try:
            session.join()
        except BaseException:
            file.close()
            raise
        return cls(session, eviction_policy(eviction))

    def sync(self) -> None:
        """Take in what other processes changed, and finish what was put off; to be called once a step."""
        self._check_open()
        if self._put_off or not self._session.is_up_to_date():
            self._locked(_nothing)

    def ready(self, key: bytes) -> bool:
        """Return whether ``key`` is published, as far as this process knows (one dictionary look-up)."""
        return key in self._mirror.ready

    def writing(self, key: bytes) -> bool:
        """Return whether some process has reserved ``key`` and not published it yet."""
        return key in self._mirror.writing

    def on_change(self, listener: ChangeListener) -> None:
        """Call ``listener(key, present)`` for every ready key that appears or vanishes from now on, own or others'.

        Called from within this object's methods, never while the index is locked.
        """
        self._listeners.append(listener)

    def reserve(self, keys: Sequence[bytes], protect: Collection[bytes] = ()) -> list[PageRef] | None:
        """Reserve a page for every key that is neither published nor being written, evicting others if need be.

        Args:
            keys: In prefix order.
            protect: Keys that must not be evicted for it (the same prefix's); ``keys`` never are.

        Returns:
            The reservations, in the order of ``keys``, ready and writing ones left out; None (nothing reserved,
            nothing evicted) when there is no room and too little to evict, or the index is locked.

        Raises:
            ValueError: A key is empty or longer than MAX_KEY_BYTES.
        """
        for key in keys:
            if not 0 < len(key) <= MAX_KEY_BYTES:
                raise ValueError(f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} are allowed")
        return self._locked(partial(self._reserve, keys, protect))

    def publish(self, refs: Sequence[PageRef]) -> None:
        """Make reserved pages readable; to be called after every rank has sealed its page. ``refs`` in prefix order."""
        self._soon(partial(self._publish, refs))

    def abandon(self, refs: Sequence[PageRef]) -> None:
        """Give reservations back; to be called when no worker writes into them any more."""
        self._soon(partial(self._abandon, refs))

    def pin(self, keys: Sequence[bytes]) -> list[PageRef] | None:
        """Keep published pages from eviction by any process until ``unpin``; counts as their use.

        A page may be pinned several times. If this process dies, its pins vanish.

        Returns:
            One reference for each key in order, or None (nothing pinned) when one has vanished or the index is locked.
        """
        return self._locked(partial(self._pin, keys))

    def unpin(self, refs: Sequence[PageRef]) -> None:
        """Give back what ``pin`` returned. Takes no lock, unless a withdrawn page can be freed.

        Raises:
            ValueError: This process has not pinned one of them; the others are unpinned all the same.
        """
        self._check_open()
        unknown = [ref for ref in refs if not self._session.unpin(ref.slot, ref.generation)]
        if any(ref.slot in self._mirror.poisoned for ref in refs):
            self._soon(self._session.free_withdrawn)
        if unknown:
            raise ValueError(f"{len(unknown)} of {len(refs)} pages are not pinned by this process: unpinned twice?")

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note the use of published keys, in prefix order; the deepest is then evicted first. Absent ones are skipped.

        Takes no lock. Touch the whole prefix when a request finishes: an ancestor's eviction makes its descendants
        useless, so it must look younger than they.
        """
        self._check_open()
        ready = self._mirror.ready
        self._note_use([ready[key] for key in keys if key in ready])

    def poison(self, refs: Sequence[PageRef]) -> None:
        """Withdraw pages whose bytes are wrong: not served from now on; the space returns once nobody has them pinned.

        A key that was reserved or published anew since is left alone. This process does not find the key any more even
        while the index is locked: else it would ask for the same page for ever.
        """
        for ref in refs:
            if self._mirror.generations[ref.slot] == ref.generation:
                self._mirror.hide(ref.slot)
        self._soon(partial(self._poison, refs))

    def statistics(self) -> ShadowStatistics:
        """Return the figures as of the last change that this process has taken in."""
        mirror, counters = self._mirror, self._session.counters
        ready, writing = mirror.count(SlotState.READY), mirror.count(SlotState.WRITING)
        return ShadowStatistics(
            capacity_pages=len(mirror.keys),
            used_pages=ready,
            writing_pages=writing,
            poisoned_pages=len(mirror.poisoned),
            free_pages=len(mirror.free),
            pinned_pages=len({slot for slot, _ in self._session.own_pins}),
            **{name: getattr(counters, name) for name in counters.__slots__},
        )

    def close(self) -> None:
        """Give up pins and reservations; published pages stay. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._session.locked(self._finish_put_off)
        self._session.leave()
        self._session.file.close()

    def _forget(self) -> None:
        # In a forked child: pins and reservations are the parent's.
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("the shadow index is closed, or was opened by the parent of this process")

    def _locked(self, operation: Callable[[], T]) -> T | None:
        self._check_open()

        def run() -> T:
            self._finish_put_off()
            return operation()

        try:
            return self._session.locked(run)
        finally:
            self._tell()

    def _soon(self, operation: Callable[[], None]) -> None:
        self._put_off.append(operation)
        self._locked(_nothing)

    def _finish_put_off(self) -> None:
        while self._put_off:
            self._put_off.popleft()()

    def _tell(self) -> None:
        changes = self._mirror.changes
        if not self._listeners:
            changes.clear()
        while changes:
            key, is_present = changes.popleft()
            for listener in self._listeners:
                listener(key, is_present)

    def _note_use(self, slots: Sequence[int]) -> None:
        tick = self._session.next_tick(len(slots))
        for depth, slot in enumerate(slots):
            self._session.file.set_last_use(slot, tick - depth)

    def _reserve(self, keys: Sequence[bytes], protect: Collection[bytes]) -> list[PageRef] | None:
        mirror, session = self._mirror, self._session
        wanted = [key for key in dict.fromkeys(keys) if key not in mirror.ready and key not in mirror.writing]
        slots = self._room.find(len(wanted), (frozenset(keys), protect))
        if slots is None:
            return None
        refs = []
        for key, slot in zip(wanted, slots, strict=True):
            generation = self._random.getrandbits(63) + 1
            session.counters.evicted += mirror.states[slot] == SlotState.READY
            session.write(slot, SlotRecord(SlotState.WRITING, key, generation, session.number, 0))
            refs.append(PageRef(key, slot, generation))
        return refs

    def _publish(self, refs: Sequence[PageRef]) -> None:
        session = self._session
        tick = session.next_tick(len(refs))
        for depth, ref in enumerate(refs):
            if not self._is_in(SlotState.WRITING, ref):
                session.counters.lost += 1
                continue
            record = SlotRecord(SlotState.READY, ref.key, ref.generation, session.number, tick - depth)
            session.write(ref.slot, record)
            session.file.set_last_use(ref.slot, tick - depth)
            session.counters.published += 1

    def _abandon(self, refs: Sequence[PageRef]) -> None:
        for ref in refs:
            if self._is_in(SlotState.WRITING, ref):
                self._session.write(ref.slot, None)
                self._session.counters.abandoned += 1

    def _is_in(self, state: SlotState, ref: PageRef) -> bool:
        self._session.confirm(ref.slot)
        mirror = self._mirror
        return mirror.states[ref.slot] == state and mirror.generations[ref.slot] == ref.generation

    def _pin(self, keys: Sequence[bytes]) -> list[PageRef] | None:
        slots = []
        for key in keys:
            slot = self._ready_slot(key)
            if slot is None:
                return None
            slots.append(slot)
        refs: list[PageRef] = []
        for key, slot in zip(keys, slots, strict=True):
            if not self._session.pin(slot):
                for ref in refs:
                    self._session.unpin(ref.slot, ref.generation)
                return None
            refs.append(PageRef(key, slot, self._mirror.generations[slot]))
        self._note_use(slots)
        return refs

    def _ready_slot(self, key: bytes) -> int | None:
        slot = self._mirror.ready.get(key)
        while slot is not None and not self._session.confirm(slot):
            slot = self._mirror.ready.get(key)
        return slot

    def _poison(self, refs: Sequence[PageRef]) -> None:
        for ref in refs:
            if self._is_in(SlotState.READY, ref) or self._is_in(SlotState.WRITING, ref):
                self._session.withdraw(ref.slot)
                self._session.counters.poisoned += 1


def _nothing() -> None:
    return None
