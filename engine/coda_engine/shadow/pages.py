"""The worker's half: the bytes of the pages of one rank, each sealed with what it is and a checksum."""

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from coda_engine.shadow.layout import PageRef, ShadowLayout


class ShadowPages:
    """All pages of one rank, mapped into this process. Methods may be called from several threads.

    Attributes:
        payload: Every page: uint8, shape (slots, page stride in bytes >= page_bytes), C-contiguous and aligned to
            4,096 bytes, so that a GPU worker can register the whole array as pinned memory (its address is
            ``payload.ctypes.data``, its size ``payload.nbytes``). It must not be touched after ``close()``.
    """

    payload: NDArray[np.uint8]

    @classmethod
    def open(cls, folder: Path, layout: ShadowLayout, rank: int) -> Self:
        """Return the pages of ``rank``; whoever comes first makes folder and files.

        The space is reserved here (a full /dev/shm is an error now, never a SIGBUS later).

        Raises:
            ShadowError: Too little space, a folder or file of another owner or open to others, a file system without
                the locks that the store needs.
            ValueError: ``rank`` is not one of the layout's.
        """
        raise NotImplementedError

    def begin_write(self, ref: PageRef) -> bool:
        """Take part in ``ref``'s reservation; to be called before the first byte is written into its page.

        While this object is open, the reservation's slot cannot go to another engine, even if the scheduler that
        reserved it dies: without this a worker that outlives its scheduler could write into a page that is not its
        own any more. Costs a look at the index, and one system call the first time.

        Returns:
            False if the reservation is gone: do not write, report the copy as failed.
        """
        raise NotImplementedError

    def page(self, slot: int) -> NDArray[np.uint8]:
        """Return a writable view of the page, uint8, shape (page_bytes,)."""
        raise NotImplementedError

    def seal(self, ref: PageRef) -> None:
        """Mark the page's present bytes as those of ``ref``: key, generation, length and xxh3 checksum."""
        raise NotImplementedError

    def intact(self, ref: PageRef, copy: NDArray[np.uint8] | None = None) -> bool:
        """Return whether the page's bytes are those that were sealed for exactly this key and generation.

        Args:
            ref: A pinned page.
            copy: Verify these bytes (a contiguous copy of the page) instead of the page itself.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up the mapping and every reservation taken part in; a second call does nothing."""
        raise NotImplementedError
