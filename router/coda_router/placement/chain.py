"""Placement as a chain of stages, and the chains that a live router can run (paper section 5)."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_engine.contract.settings import PlacementPolicyName, PlacementSettings
from coda_router.placement.affinity import KVAffinity
from coda_router.placement.candidates import Candidates
from coda_router.placement.context import ContextDistance
from coda_router.placement.fitness import Fitness
from coda_router.placement.frontier import BelowFrontier
from coda_router.placement.least_work import LeastWork
from coda_router.placement.load import MinimumLoad
from coda_router.placement.model import TakesModel
from coda_router.placement.observations import Placement, PlacementRequest, WorkerView
from coda_router.placement.overload import WithinLoadBound
from coda_router.placement.power_of_two import PowerOfTwo
from coda_router.placement.prefix_hash import HashOwner
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.rotation import Rotation, SessionRotation
from coda_router.placement.smetric import WorthReturning
from coda_router.placement.smetric_v2 import AnswersInTime
from coda_router.placement.stage import Stage


@dataclass(frozen=True, slots=True)
class PlacementChain:
    """Stages asked in order until one decides or nothing remains.

    Attributes:
        stages: The stages; at least one.
    """

    stages: tuple[Stage, ...]

    def place(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Placement:
        """Return where ``request`` goes, and what every stage found on the way."""
        candidates = Candidates.of(workers)
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
    return PlacementChain((Fitness(), TakesModel(), BelowFrontier(), *_preferences(settings)))


def _preferences(settings: PlacementSettings) -> tuple[Stage, ...]:
    """Return the stages that choose among the workers that can take a request."""
    bound = settings.overload_bound
    match settings.policy:
        case PlacementPolicyName.CODA:
            return WithinLoadBound(bound), KVAffinity(), MinimumLoad(band_requests=1), ContextDistance()
        case PlacementPolicyName.SMETRIC:
            return WorthReturning(bound), MinimumLoad()
        case PlacementPolicyName.SMETRIC_V2:
            return AnswersInTime(WorthReturning(bound)), LeastWork()
        case PlacementPolicyName.CACHEWISE_RR:
            # CacheWise (arXiv 2606.16824) decides inside one engine; what is published of it names no router. Over
            # several engines it gets the one that its KV reuse needs: new sessions in turn, each then at its home.
            return KVAffinity(), SessionRotation()
        case PlacementPolicyName.ROUND_ROBIN:
            return (Rotation(),)
        case PlacementPolicyName.LEAST_LOADED:
            return (MinimumLoad(),)
        case PlacementPolicyName.POWER_OF_TWO:
            return (PowerOfTwo(),)
        case PlacementPolicyName.PREFIX_HASH:
            return (HashOwner(bound),)
