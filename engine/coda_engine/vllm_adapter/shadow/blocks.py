"""The KV cache of one rank as blocks: where a block's bytes lie, layer by layer, and in a page of the shadow."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer's share of a page.

    Attributes:
        rows: The layer's KV, one row of bytes for each block; shape (blocks, bytes with padding).
        start: Where the share begins in a page, bytes.
        size: Its length, bytes.
    """

    rows: torch.Tensor
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """The blocks of one rank's KV cache; a page holds the layers' shares one after another."""

    parts: tuple[LayerPart, ...]

    @classmethod
    def of(cls, caches: CanonicalKVCaches) -> Self:
        """Return the blocks of vLLM's description of a KV cache with one group."""
        parts, start = [], 0
        (group,) = caches.group_data_refs
        for ref in group:
            parts.append(LayerPart(caches.tensors[ref.tensor_idx].tensor, start, ref.page_size_bytes))
            start += ref.page_size_bytes
        return cls(tuple(parts))

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(part.size for part in self.parts)


class HostCopies:
    """Plain copies between blocks and pages in host memory."""

    def __init__(self, blocks: KvBlocks) -> None:
        self._parts = [
            (part.rows.numpy().view(np.uint8), part.start, part.start + part.size, part.size) for part in blocks.parts
        ]

    def to_page(self, block: int, page: Bytes) -> None:
        """Copy a block into a page."""
        for rows, start, stop, size in self._parts:
            page[start:stop] = rows[block, :size]

    def from_page(self, page: Bytes, block: int) -> None:
        """Copy a page into a block."""
        for rows, start, stop, size in self._parts:
            rows[block, :size] = page[start:stop]
