"""The scheduler's half: which key is on which page, who writes it and who reads it, for all engines of a node."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

from coda_engine.shadow.eviction import EvictionPolicyName
from coda_engine.shadow.layout import PageRef, ShadowLayout
from coda_engine.shadow.statistics import ShadowStatistics

ChangeListener = Callable[[bytes, bool], None]
"""Called with a key and whether it is ready now (True) or has vanished (False)."""


class ShadowIndex:
    """One process's view of the index and its way to change it. One thread uses it; many processes may.

    Every change is made under one lock that the kernel releases when its holder dies. No call waits for that lock
    longer than ``lock_wait_s``: what cannot be done then is refused (``reserve``, ``pin``) or done at a later call
    (``publish``, ``abandon``, ``poison``). After a fork the child's copy is closed.
    """

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
        raise NotImplementedError

    def sync(self) -> None:
        """Take in what other processes changed, and finish what was put off; to be called once a step."""
        raise NotImplementedError

    def ready(self, key: bytes) -> bool:
        """Return whether ``key`` is published, as far as this process knows (one dictionary look-up)."""
        raise NotImplementedError

    def writing(self, key: bytes) -> bool:
        """Return whether some process has reserved ``key`` and not published it yet."""
        raise NotImplementedError

    def on_change(self, listener: ChangeListener) -> None:
        """Call ``listener(key, present)`` for every ready key that appears or vanishes from now on, own or others'.

        Called from within this object's methods, never while the index is locked.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    def publish(self, refs: Sequence[PageRef]) -> None:
        """Make reserved pages readable; to be called after every rank has sealed its page. ``refs`` in prefix order."""
        raise NotImplementedError

    def abandon(self, refs: Sequence[PageRef]) -> None:
        """Give reservations back; to be called when no worker writes into them any more."""
        raise NotImplementedError

    def pin(self, keys: Sequence[bytes]) -> list[PageRef] | None:
        """Keep published pages from eviction by any process until ``unpin``; counts as their use.

        A page may be pinned several times. If this process dies, its pins vanish.

        Returns:
            One reference for each key in order, or None (nothing pinned) when one has vanished or the index is locked.
        """
        raise NotImplementedError

    def unpin(self, refs: Sequence[PageRef]) -> None:
        """Give back what ``pin`` returned.

        Raises:
            ValueError: This process has not pinned one of them; the others are unpinned all the same.
        """
        raise NotImplementedError

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note the use of published keys, in prefix order; the deepest is then evicted first. Absent ones are skipped.

        Takes no lock. Touch the whole prefix when a request finishes: an ancestor's eviction makes its descendants
        useless, so it must look younger than they.
        """
        raise NotImplementedError

    def poison(self, refs: Sequence[PageRef]) -> None:
        """Withdraw pages whose bytes are wrong: not served from now on; the space returns once nobody has them pinned.

        A key that was reserved or published anew since is left alone.
        """
        raise NotImplementedError

    def statistics(self) -> ShadowStatistics:
        """Return the figures as of the last change that this process has taken in."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up pins and reservations; published pages stay. A second call does nothing."""
        raise NotImplementedError
