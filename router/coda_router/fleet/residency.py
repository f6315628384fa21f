"""Which engine has how much of which session, as the engines' session tables tell: one table for the whole fleet."""

from collections.abc import Iterable, Mapping

from coda_router.recency import RecencyTable

MAX_ROWS = 262_144
"""Most rows kept, of all engines together: 64 engines, each with as many sessions as an engine tells of."""


class Residency:
    """Resident tokens by session and worker; the row that was told least recently goes first.

    One look-up tells all workers that have any of a session, however many workers there are. A row costs
    34 bytes. Sessions are known by the 64-bit hash of their key, see :class:`RecencyTable`.

    Args:
        max_rows: Most rows; >= 1.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._table = RecencyTable(max_rows)
        self._tokens = self._table.int_column("I")
        self._workers = self._table.int_column("I")
        self._numbers: dict[str, int] = {}
        self._names = [""]  # 0 owns no row: so reads the column of a slot that is not in use
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._table)

    def tokens_by_worker(self, key: str) -> dict[str, int]:
        """Return worker name to resident tokens of a session, for the workers that have any of it; tokens > 0."""
        slot = self._table.find(hash(key))
        found = {}
        while slot:
            found[self._names[self._workers[slot]]] = self._tokens[slot]
            slot = self._table.find_next(slot)
        return found

    def tokens_at(self, worker: str, key: str) -> int:
        """Return the tokens of a session's prefix in one worker's HBM or shadow, as far as it has told."""
        return self.tokens_by_worker(key).get(worker, 0)

    def update(self, worker: str, tokens: Mapping[str, int], removed: Iterable[str]) -> list[int]:
        """Take what a worker says has changed.

        Args:
            worker: The worker's name.
            tokens: Session key to tokens in HBM or the shadow, new or changed; 0 = nothing is left.
            removed: Keys of further sessions of which nothing is left.

        Returns:
            Hashes of the keys of which nothing is left.
        """
        number = self._number(worker)
        gone = [hash(key) for key in removed]
        gone += [hash(key) for key, resident_tokens in tokens.items() if resident_tokens <= 0]
        for key_hash in gone:
            slot = self._row(number, key_hash)
            if slot:
                self._remove(slot)
        for key, resident_tokens in tokens.items():
            if resident_tokens > 0:
                self._put(number, hash(key), min(resident_tokens, 2**32 - 1))
        return gone

    def replace(self, worker: str, tokens: Mapping[str, int]) -> list[int]:
        """Take a worker's whole table.

        Returns:
            Hashes of the keys of which nothing is left.
        """
        kept = {hash(key) for key, resident_tokens in tokens.items() if resident_tokens > 0}
        gone = [key_hash for key_hash in self._drop_rows(worker) if key_hash not in kept]
        return gone + [key_hash for key_hash in self.update(worker, tokens, ()) if key_hash not in kept]

    def forget(self, worker: str) -> None:
        """Forget all of a worker that has restarted or left."""
        self._drop_rows(worker)
        number = self._numbers.pop(worker, None)
        if number is not None:
            self._free.append(number)

    def _drop_rows(self, worker: str) -> list[int]:
        """Remove a worker's rows; return their key hashes. Walks all rows, which is for rare occasions."""
        number = self._numbers.get(worker)
        if number is None:
            return []
        slots = [slot for slot, owner in enumerate(self._workers) if owner == number]
        hashes = [self._table.hash_at(slot) for slot in slots]
        for slot in slots:
            self._remove(slot)
        return hashes

    def _number(self, worker: str) -> int:
        number = self._numbers.get(worker)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._names[number] = worker
            else:
                number = len(self._names)
                self._names.append(worker)
            self._numbers[worker] = number
        return number

    def _row(self, number: int, key_hash: int) -> int:
        slot = self._table.find(key_hash)
        while slot and self._workers[slot] != number:
            slot = self._table.find_next(slot)
        return slot

    def _put(self, number: int, key_hash: int, resident_tokens: int) -> None:
        slot = self._row(number, key_hash)
        if slot:
            self._table.touch(slot)
        else:
            if self._table.is_full:
                self._remove(self._table.oldest)
            slot = self._table.add(key_hash)
        self._tokens[slot] = resident_tokens
        self._workers[slot] = number

    def _remove(self, slot: int) -> None:
        self._workers[slot] = 0
        self._table.remove(slot)
