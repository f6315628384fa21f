"""The workers that a decision may still choose from, with the figures that several stages ask for."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

from coda_router.placement.observations import WorkerView


class Candidates(Sequence[WorkerView]):
    """Workers as one decision sees them, in the fleet's order; never changed.

    Each figure is gathered when a stage first asks. :meth:`seen_anew` takes over those of workers that did not
    change, so that a decision over many workers does not look at each of them again.

    Args:
        views: The workers; not copied.
    """

    __slots__ = ("_loads", "_model_sets", "_positions", "_silent", "_unfit", "_views", "_waiting")

    def __init__(self, views: Sequence[WorkerView]) -> None:
        self._views = views
        self._positions: dict[str, int] | None = None
        self._model_sets: frozenset[frozenset[str]] | None = None
        self._loads: list[int] | None = None
        self._waiting: list[int] | None = None
        self._silent: int | None = None
        self._unfit: int | None = None

    @classmethod
    def of(cls, views: Sequence[WorkerView]) -> Self:
        """Return ``views`` as candidates."""
        return views if isinstance(views, cls) else cls(views)

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._views)

    @overload
    def __getitem__(self, position: int) -> WorkerView: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[WorkerView]: ...
    def __getitem__(self, position: int | slice) -> WorkerView | Sequence[WorkerView]:
        return self._views[position]

    def position(self, name: str | None) -> int | None:
        """Return the position of the worker of that name; None if it is not among these."""
        if self._positions is None:
            self._positions = {view.name: position for position, view in enumerate(self._views)}
        return self._positions.get(name) if name is not None else None

    def has(self, name: str | None) -> bool:
        """Return whether the worker of that name is among these."""
        return self.position(name) is not None

    @property
    def unfit(self) -> int:
        """How many of them do not answer or take no new requests."""
        if self._unfit is None:
            self._unfit = len(self._views) - sum([view.is_fit for view in self._views])
        return self._unfit

    @property
    def silent(self) -> int:
        """How many of them have no telemetry."""
        if self._silent is None:
            self._silent = len(self._views) - sum([view.has_telemetry for view in self._views])
        return self._silent

    def all_serve(self, model: str) -> bool:
        """Return whether all of them are known to serve a model."""
        if self._model_sets is None:
            # Mostly all serve the same: one set to look at instead of one for each worker.
            self._model_sets = frozenset([view.models for view in self._views])
        for models in self._model_sets:  # noqa: SIM110 - a generator costs more than all else here
            if model not in models:
                return False
        return True

    @property
    def loads(self) -> Sequence[int]:
        """Each worker's load, requests, in one measure for all.

        As soon as one of them has no telemetry, every load is what this router has in flight: comparing an
        engine's total with a router's part would send everything to the worker that nobody knows anything about.
        """
        if self._loads is None:
            if self.silent:
                self._loads = [view.in_flight_requests for view in self._views]
            else:
                self._loads = [view.load_requests for view in self._views]
        return self._loads

    @property
    def waiting(self) -> Sequence[int]:
        """Each worker's waiting requests."""
        if self._waiting is None:
            self._waiting = [view.waiting_requests for view in self._views]
        return self._waiting

    def only(self, views: Sequence[WorkerView]) -> Self:
        """Return some of these workers.

        Args:
            views: A part of these, in their order.
        """
        fewer = type(self)(views)
        # Where none is silent or unfit, none of a part is.
        fewer._silent = 0 if self._silent == 0 else None
        fewer._unfit = 0 if self._unfit == 0 else None
        return fewer

    def seen_anew(self, changes: Iterable[tuple[int, WorkerView]]) -> Self:
        """Return the same workers, some of them as they are now.

        Args:
            changes: Position and new view of each worker that changed; a worker keeps its name.
        """
        views = list(self._views)
        anew = type(self)(views)
        anew._positions = self._positions
        anew._silent, anew._unfit, anew._model_sets = self._silent, self._unfit, self._model_sets
        loads = self._loads.copy() if self._loads is not None and not self._silent else None
        waiting = self._waiting.copy() if self._waiting is not None else None
        for position, view in changes:
            before = views[position]
            views[position] = view
            if view.has_telemetry is not before.has_telemetry:
                anew._silent = loads = None
            if view.is_fit is not before.is_fit:
                anew._unfit = None
            if view.models is not before.models:
                anew._model_sets = None
            if loads is not None:
                loads[position] = view.load_requests
            if waiting is not None:
                waiting[position] = view.waiting_requests
        anew._loads, anew._waiting = loads, waiting
        return anew


NOBODY = Candidates(())
"""No worker at all."""
