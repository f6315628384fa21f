"""The fleet as placement sees it, kept up to date worker by worker."""

from collections.abc import Iterable

from coda_router.fleet.worker import TELEMETRY_TIMEOUT_S, Worker
from coda_router.placement.candidates import Candidates


class Lineup:
    """All workers' views at one moment, of which only those are made anew that changed since the moment before.

    A decision needs every worker's state; between two decisions a few of them change.
    """

    def __init__(self) -> None:
        self._positions: dict[Worker, int] = {}
        self._changed: set[Worker] = set()
        self._candidates: Candidates | None = None
        self._look_again_at_s = float("-inf")

    def consist_of(self, workers: Iterable[Worker]) -> None:
        """Make these the workers, in this order."""
        self._positions = {worker: position for position, worker in enumerate(workers)}
        self._candidates = None

    def changed(self, worker: Worker) -> None:
        """Note that a worker's view may be another one."""
        self._changed.add(worker)

    def candidates(self, now_s: float) -> Candidates:
        """Return every worker as placement sees it now.

        Args:
            now_s: The event loop's time, seconds.
        """
        candidates = self._candidates
        if candidates is None:
            candidates = Candidates([worker.view(now_s) for worker in self._positions])
            self._look_again_at_s = float("-inf")
            self._changed.clear()
        if now_s > self._look_again_at_s:
            self._find_silent(candidates, now_s)
        if self._changed:
            positions = self._positions
            candidates = candidates.seen_anew(
                [(positions[worker], worker.view(now_s)) for worker in self._changed if worker in positions]
            )
            self._changed.clear()
        self._candidates = candidates
        return candidates

    def _find_silent(self, candidates: Candidates, now_s: float) -> None:
        """Note the workers whose telemetry has become too old since they were looked at, and when to look again."""
        self._look_again_at_s = now_s + TELEMETRY_TIMEOUT_S
        for worker, position in self._positions.items():
            if worker.has_telemetry(now_s):
                self._look_again_at_s = min(self._look_again_at_s, worker.telemetry_until_s)
            elif candidates[position].has_telemetry:
                self._changed.add(worker)
