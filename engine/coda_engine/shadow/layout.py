"""What engines must agree on to share pages, and how one page is named."""

import hashlib
import json
from dataclasses import dataclass

MAX_KEY_BYTES = 64
"""Longest key of a page: a SHA-256 block hash with a group number takes 36."""


@dataclass(frozen=True, slots=True)
class PageRef:
    """One reservation of one slot; plain values, to be sent from the scheduler to its workers.

    Attributes:
        key: The content's name, at most MAX_KEY_BYTES; it must determine the bytes together with the layout.
        slot: Number of the page in every rank's file.
        generation: Random number of this reservation of the slot; never 0.
    """

    key: bytes
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class ShadowLayout:
    """The shape and meaning of the pages: engines share a shadow exactly if every field is equal.

    Attributes:
        identity: Everything else that decides the bytes of a key: model, revision, data type, KV layout, hash seed.
        page_bytes: Bytes of one page on one rank.
        ranks: Tensor-parallel ranks; each has its own data file.
        slots: Pages for each rank; the capacity.
    """

    identity: str
    page_bytes: int
    ranks: int
    slots: int

    def __post_init__(self) -> None:
        """Raise ValueError for a size below 1."""
        for name in ("page_bytes", "ranks", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"ShadowLayout.{name} must be at least 1 (given: {getattr(self, name)})")

    def digest(self) -> str:
        """Return 32 hexadecimal digits that name the files; equal for equal fields only."""
        fields = json.dumps([self.identity, self.page_bytes, self.ranks, self.slots])
        return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()
