"""What a stage of the chain is, and what it answers."""

from typing import Protocol

import msgspec

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason


class Narrowed(msgspec.Struct, frozen=True, gc=False):
    """What one stage leaves.

    Attributes:
        candidates: The workers that remain; empty = the request cannot be placed now.
        reason: What the stage found.
        is_final: The stage decided; later stages are not asked.
    """

    candidates: Candidates
    reason: PlacementReason
    is_final: bool = False


class Stage(Protocol):
    """One step of the chain: narrows the candidates and says why."""

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return which of ``candidates`` remain; pure."""
        ...
