"""Numbers for keys, in order of their last use, in flat memory: for tables of a million keys."""

from array import array


class RecencyTable:
    """Gives keys numbers ("slots", from 1) and knows which key was used least recently; every operation is O(1).

    A key is its 64-bit hash by Python's own ``hash`` of a string, which is another one in each process: nobody
    outside can choose keys that share a bucket. Two keys of one hash are one key here, so a table may only hold
    what is a preference, never what decides who may see what. One hash may have several slots.

    What belongs to a key is kept in columns: arrays that grow with the slots. A slot costs 24 bytes besides its
    columns, and there is no object for each: the garbage collector has nothing to walk.

    Args:
        capacity: Most slots in use at a time; the caller removes the oldest before it adds one more.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        buckets = 1 << max(capacity - 1, 1).bit_length()
        self._mask = buckets - 1
        # A bucket's first slot; 0 = none, so that slot 0 is free to head the ring of recency.
        self._buckets = array("I", bytes(4 * buckets))
        self._hashes = array("q", [0])
        # The next slot of the same bucket; of a slot that is not in use, the next one that is not either.
        self._chain = array("I", [0])
        self._newer = array("I", [0])
        self._older = array("I", [0])
        self._int_columns: list[array[int]] = []
        self._float_columns: list[array[float]] = []
        self._unused = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether nothing can be added before something is removed."""
        return self._count >= self._capacity

    @property
    def oldest(self) -> int:
        """The slot that was used least recently; 0 = the table is empty."""
        return self._newer[0]

    def int_column(self, typecode: str) -> "array[int]":
        """Return an array with one item for each slot; the caller writes it when it adds one."""
        column = array(typecode, bytes(array(typecode).itemsize * len(self._hashes)))
        self._int_columns.append(column)
        return column

    def float_column(self) -> "array[float]":
        """Return an array of doubles with one item for each slot."""
        column = array("d", bytes(8 * len(self._hashes)))
        self._float_columns.append(column)
        return column

    def find(self, key_hash: int) -> int:
        """Return a slot of the key; 0 = it has none."""
        slot = self._buckets[key_hash & self._mask]
        while slot and self._hashes[slot] != key_hash:
            slot = self._chain[slot]
        return slot

    def find_next(self, slot: int) -> int:
        """Return another slot of the same key after ``slot``; 0 = there is no more."""
        key_hash = self._hashes[slot]
        slot = self._chain[slot]
        while slot and self._hashes[slot] != key_hash:
            slot = self._chain[slot]
        return slot

    def hash_at(self, slot: int) -> int:
        """Return the key of a slot that is in use."""
        return self._hashes[slot]

    def add(self, key_hash: int) -> int:
        """Return a new slot of the key, the most recently used one.

        Raises:
            OverflowError: The table is full.
        """
        if self._count >= self._capacity:
            raise OverflowError(f"the table holds {self._capacity} keys already; remove the oldest first")
        slot = self._unused
        if slot:
            self._unused = self._chain[slot]
        else:
            slot = self._grow()
        bucket = key_hash & self._mask
        self._hashes[slot] = key_hash
        self._chain[slot] = self._buckets[bucket]
        self._buckets[bucket] = slot
        self._count += 1
        self._link_newest(slot)
        return slot

    def touch(self, slot: int) -> None:
        """Make a slot the most recently used one."""
        self._unlink(slot)
        self._link_newest(slot)

    def remove(self, slot: int) -> None:
        """Give a slot up."""
        self._unlink(slot)
        bucket, after = self._hashes[slot] & self._mask, self._chain[slot]
        before = self._buckets[bucket]
        if before == slot:
            self._buckets[bucket] = after
        else:
            while self._chain[before] != slot:
                before = self._chain[before]
            self._chain[before] = after
        self._chain[slot] = self._unused
        self._unused = slot
        self._count -= 1

    def _grow(self) -> int:
        slot = len(self._hashes)
        for column in (self._hashes, self._chain, self._newer, self._older, *self._int_columns):
            column.append(0)
        for floats in self._float_columns:
            floats.append(0.0)
        return slot

    def _link_newest(self, slot: int) -> None:
        newest = self._older[0]
        self._newer[newest] = slot
        self._older[slot] = newest
        self._newer[slot] = 0
        self._older[0] = slot

    def _unlink(self, slot: int) -> None:
        newer, older = self._newer[slot], self._older[slot]
        self._newer[older] = newer
        self._older[newer] = older
