"""Placement as a chain of stages, and the chains that a live router can run (paper section 5)."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_engine.contract.settings import PlacementPolicyName, PlacementSettings
from coda_router.placement.affinity import KVAffinity
from coda_router.placement.context import ContextDistance
from coda_router.placement.fitness import Fitness
from coda_router.placement.frontier import BelowFrontier
from coda_router.placement.load import MinimumLoad
from coda_router.placement.model import TakesModel
from coda_router.placement.observations import Placement, PlacementRequest, Stage, WorkerView
from coda_router.placement.overload import WithinLoadBound
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.rotation import Rotation
from coda_router.placement.smetric import WorthReturning


@dataclass(frozen=True, slots=True)
class PlacementChain:
    """Stages asked in order until one decides or nothing remains.

    Attributes:
        stages: The stages; at least one.
    """

    stages: tuple[Stage, ...]

    def place(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Placement:
        """Return where ``request`` goes, and what every stage found on the way."""
        candidates = workers
        trail: list[PlacementReason] = []
        for stage in self.stages:
            narrowed = stage.narrow(request, candidates)
            trail.append(narrowed.reason)
            candidates = narrowed.candidates
            if not candidates:
                return Placement(None, narrowed.reason, tuple(trail))
            if narrowed.is_final:
                break
        chosen = candidates[request.rotation % len(candidates)]
        return Placement(chosen.name, trail[-1], tuple(trail))


def chain_for(settings: PlacementSettings) -> PlacementChain:
    """Return the chain that the settings name."""
    can_take: tuple[Stage, ...] = (Fitness(), TakesModel(), BelowFrontier())
    match settings.policy:
        case PlacementPolicyName.ROUND_ROBIN:
            return PlacementChain((*can_take, Rotation()))
        case PlacementPolicyName.LEAST_LOADED:
            return PlacementChain((*can_take, MinimumLoad()))
        case PlacementPolicyName.SMETRIC:
            return PlacementChain((*can_take, WorthReturning(settings.overload_bound), MinimumLoad()))
        case PlacementPolicyName.CODA:
            preferences = (
                WithinLoadBound(settings.overload_bound),
                KVAffinity(),
                MinimumLoad(band_requests=1),
                ContextDistance(),
            )
            return PlacementChain((*can_take, *preferences))
