"""Execution admission: how a pure-decode step is grouped for attention (paper section 4.3, Appendix A)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coda_engine.contract.reasons import PlanReason


class AttentionProfile(Protocol):
    """Conservative gain of a two-cohort execution, from a measured profile."""

    def covers(self, contexts: Sequence[int]) -> bool:
        """Return whether the shape lies in the profile's measured domain."""
        ...

    def conservative_gain(self, ordered_contexts: Sequence[int], cut: int, launch_allowance_ms: float) -> float:
        """Return the relative gain of cutting after ``cut`` shortest contexts, less its residual bound."""
        ...


@dataclass(frozen=True, slots=True)
class CohortPlan:
    """How a step runs. ``cut`` is how many shortest contexts form the first cohort; 0 = complete population."""

    cut: int
    reason: PlanReason
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class CompatibilityAware:
    """Compatibility-Aware execution admission with the gates of Appendix A.

    Attributes:
        min_requests: Fewest requests for cohorts to be considered.
        min_context_ratio: Smallest longest-to-shortest ratio.
        min_cohort: M_min, fewest requests in a cohort.
        min_share: rho, smallest share of the population in a cohort; in (0, 0.5].
        launch_allowance_ms: Cost of the second launch, milliseconds.
        min_gain: Gamma, smallest conservative relative gain.
    """

    min_requests: int = 4
    min_context_ratio: float = 1.5
    min_cohort: int = 2
    min_share: float = 0.35
    launch_allowance_ms: float = 0.3
    min_gain: float = 0.05

    def cuts(self, population: int) -> range:
        """Return K(t): the cuts that leave m = max(M_min, ceil(rho n)) requests on either side."""
        smallest = max(self.min_cohort, math.ceil(self.min_share * population))
        return range(smallest, population - smallest + 1)

    def plan(self, contexts: Sequence[int], profile: AttentionProfile | None) -> CohortPlan:
        """Return the plan for decoding requests with these materialised contexts (tokens, any order).

        Gain ties favour the more balanced cut, then the smaller one (Appendix A).
        """
        population = len(contexts)
        if population < self.min_requests:
            return CohortPlan(0, PlanReason.TOO_FEW_REQUESTS)
        ordered = sorted(contexts)
        if ordered[-1] < self.min_context_ratio * max(1, ordered[0]):
            return CohortPlan(0, PlanReason.TOO_UNIFORM)
        cuts = self.cuts(population)
        if not cuts:
            return CohortPlan(0, PlanReason.NO_BALANCED_CUT)
        if profile is None:
            return CohortPlan(0, PlanReason.NO_ATTENTION_PROFILE)
        if not profile.covers(ordered):
            return CohortPlan(0, PlanReason.OUT_OF_DOMAIN)
        gains = {cut: profile.conservative_gain(ordered, cut, self.launch_allowance_ms) for cut in cuts}
        best = max(cuts, key=lambda cut: (gains[cut], -abs(population - 2 * cut), -cut))
        if gains[best] < self.min_gain:
            return CohortPlan(0, PlanReason.GAIN_TOO_SMALL, gains[best])
        return CohortPlan(best, PlanReason.COHORTS, gains[best])
