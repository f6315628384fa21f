"""The index's record of one slot: 96 bytes with a checksum; all zeros is a free slot."""

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from coda_engine.shadow.layout import MAX_KEY_BYTES

RECORD_BYTES = 96
FREE_RECORD = bytes(RECORD_BYTES)

_FIELDS = struct.Struct(f"<BBHIQQ{MAX_KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = _FIELDS.size


class SlotState(IntEnum):
    """What a slot is used for."""

    FREE = 0
    WRITING = 1
    """Reserved by its owner; the bytes are not there yet."""
    READY = 2
    """Published."""
    POISONED = 3
    """Served no more, but some reader still looks at it."""


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A slot that is not free.

    Attributes:
        state: Anything but FREE.
        key: The content's name.
        generation: The reservation's random number.
        owner: Number of the participant that reserved it.
        published_tick: When it was published (reserved, until then).
    """

    state: SlotState
    key: bytes
    generation: int
    owner: int
    published_tick: int


def encode_record(slot: int, record: SlotRecord) -> bytes:
    """Return the record's bytes; they are valid in this slot only."""
    fields = _FIELDS.pack(
        record.state, len(record.key), record.owner, 0, record.generation, record.published_tick, record.key
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields, seed=slot))


def decode_record(slot: int, raw: bytes) -> SlotRecord | None:
    """Return what the bytes say about a slot that is not free (see ``FREE_RECORD``); None if they are damaged."""
    fields = raw[:_CHECKED_BYTES]
    if _CHECKSUM.unpack_from(raw, _CHECKED_BYTES)[0] != xxhash.xxh3_64_intdigest(fields, seed=slot):
        return None
    state, key_bytes, owner, _, generation, published_tick, key = _FIELDS.unpack(fields)
    return SlotRecord(_STATES[state], key[:key_bytes], generation, owner, published_tick)


_STATES = {state.value: state for state in SlotState}
