"""The measurement: every spot once in every round, so that a slow minute of the machine hits all alike."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from coda_engine.contract.errors import describe_validation_error
from coda_engine.contract.measured import CostCurve, PrefillGrid, RestoreProfile
from coda_engine.contract.profile import Profile, Provenance
from coda_engine.profiling.engine import EngineClient
from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.fit import fit_grid, fit_prefill, fit_restore
from coda_engine.profiling.plan import FULL, Effort, MeasurementPlan, Part, Spot, plan_measurement
from coda_engine.profiling.resume import SampleFile
from coda_engine.profiling.sampler import Sampler

Progress = Callable[[str], None]


def measure_profile(
    client: EngineClient,
    *,
    effort: Effort,
    progress: Progress,
    samples_file: Path | None = None,
) -> Profile:
    """Measure the engine behind ``client`` and return a validated artifact; nothing is delivered or written.

    Each prompt is random token ids that were never sent before and is answered with one token. Contexts and
    restores reuse what a round's own prompts left. A sample during which the engine did anything else is thrown
    away and taken again.

    Args:
        client: A running engine that nobody else uses.
        effort: How much; parts that :data:`QUICK` leaves out are told to ``progress``.
        progress: Gets a line for each part of each round, with the time that is left.
        samples_file: Keeps the samples, so that an interrupted measurement of the same configuration goes on
            where it stopped; removed at the end, good or bad. None = an interrupted one is lost.

    Raises:
        EngineRequestError: The engine is not there or has no plug-ins.
        EngineBusyError: Others use the engine.
        MeasurementError: A curve does not grow, or does not predict its held-out points; of a quick profile only the
            prefill curve.
    """
    sampler = Sampler(client)
    kept = SampleFile(samples_file, sampler.key, effort) if samples_file is not None else None
    progress("warming up")
    probe_ms = sampler.probe_ms()
    known = kept.read() if kept is not None else None
    if known is not None:
        plan, samples, elapsed_s = known
        progress(f"going on with {sum(map(len, samples.values()))} samples of {samples_file}")
    else:
        plan, samples, elapsed_s = plan_measurement(probe_ms, sampler.limits(), effort), {}, 0.0
    run = _Run(sampler, plan, defaultdict(list, samples), progress, kept, client.clock() - elapsed_s)
    try:
        fitted = run.measure()
    except MeasurementError:
        # Samples that are no curve after every extra round are of no use to the next measurement either.
        if kept is not None:
            kept.remove()
        raise
    if kept is not None:
        kept.remove()
    return Profile(
        full_key=sampler.key,
        prefill=fitted.require_prefill(),
        prefill_grid=fitted.grid,
        restore=fitted.restore,
        provenance=Provenance(
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=round(run.elapsed_s, 1),
            coda_version=version("coda-serving"),
            quick=effort != FULL,
        ),
    )


@dataclass(slots=True)
class _Fitted:
    """The parts that passed their check so far."""

    prefill: CostCurve | None = None
    grid: PrefillGrid | None = None
    restore: RestoreProfile | None = None
    problems: dict[Part, MeasurementError] = field(default_factory=dict)

    @property
    def worst(self) -> MeasurementError:
        """The first part's problem: others may follow from it."""
        return next(iter(self.problems.values()))

    def require_prefill(self) -> CostCurve:
        if self.prefill is None:
            raise AssertionError("a measurement ends with a prefill curve or an error")
        return self.prefill


class _Run:
    """One measurement on its way through the rounds."""

    def __init__(
        self,
        sampler: Sampler,
        plan: MeasurementPlan,
        samples: dict[Spot, list[float]],
        progress: Progress,
        kept: SampleFile | None,
        started_s: float,
    ) -> None:
        self._sampler = sampler
        self._plan = plan
        self._samples = samples
        self._progress = progress
        self._kept = kept
        self._started_s = started_s
        self._spent_s = self._expected_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return self._sampler.client.clock() - self._started_s

    def measure(self) -> _Fitted:
        """Return every part of the plan, fitted; parts that miss their check get the extra rounds."""
        effort, fitted, pending = self._plan.effort, _Fitted(), self._plan.parts
        last = effort.rounds + effort.extra_rounds
        for number in range(1, last + 1):
            self._round(number, pending)
            if number < effort.rounds:
                continue
            pending = self._fit(pending, fitted)
            if not pending:
                return fitted
            if number == last or self._may_do_without(fitted.problems):
                break
            self._progress(f"once more: {fitted.worst}")
        if effort.optional_until_s is None or Part.PREFILL in fitted.problems:
            raise fitted.worst
        for problem in fitted.problems.values():
            self._progress(f"left out of the profile: {problem}")
        return fitted

    def _may_do_without(self, parts: Collection[Part]) -> bool:
        """Return whether it is too late for more rounds of ``parts``, and a profile without them is one."""
        until_s = self._plan.effort.optional_until_s
        return until_s is not None and self.elapsed_s >= until_s and Part.PREFILL not in parts

    def _round(self, number: int, parts: Iterable[Part]) -> None:
        self._sampler.begin_round()
        for part in parts:
            missing = [spot for spot in self._plan.of(part) if len(self._samples[spot]) < number]
            for spot in missing:
                self._sample(spot)
            if missing:
                self._progress(
                    f"{self._round_name(number)}: {_NAMES[part]} measured, {self.elapsed_s:.0f} s so far, about "
                    f"{self._left_s():.0f} s left"
                )

    def _round_name(self, number: int) -> str:
        effort = self._plan.effort
        extra = number - effort.rounds
        return f"extra round {extra} of {effort.extra_rounds}" if extra > 0 else f"round {number} of {effort.rounds}"

    def _sample(self, spot: Spot) -> None:
        began_s = self._sampler.client.clock()
        self._samples[spot].append(self._sampler.sample_ms(spot))
        self._spent_s += self._sampler.client.clock() - began_s
        self._expected_s += spot.expected_s(self._plan.tokens_per_s)
        if self._kept is not None:
            self._kept.write(self._plan, self._samples, self.elapsed_s)

    def _left_s(self) -> float:
        """Return about how long the regular rounds still take, from how long this run's samples took."""
        plan = self._plan
        left_s = sum(
            spot.expected_s(plan.tokens_per_s) * max(0, plan.effort.rounds - len(self._samples[spot]))
            for spot in plan.spots
        )
        return left_s * (self._spent_s / self._expected_s if self._expected_s else 1.0)

    def _fit(self, pending: Iterable[Part], fitted: _Fitted) -> tuple[Part, ...]:
        """Fit what can be fitted into ``fitted``; return the parts to measure once more."""
        fitted.problems.clear()
        for part in pending:
            try:
                self._fit_part(part, fitted)
            except MeasurementError as error:
                fitted.problems[part] = error
            except ValidationError as error:
                # What the artifact would refuse is no measurement either, whatever the fit thought of it.
                fitted.problems[part] = MeasurementError(f"{part}: {describe_validation_error(error, part.value)}")
        again = set(fitted.problems)
        if Part.GRID in again:
            # Its row without context is the prefill curve, whose noise may only show here.
            again.add(Part.PREFILL)
        return tuple(part for part in Part if part in again)

    def _fit_part(self, part: Part, fitted: _Fitted) -> None:
        match part:
            case Part.PREFILL:
                fitted.prefill = fit_prefill(self._plan, self._samples)
            case Part.GRID:
                if fitted.prefill is None:
                    raise MeasurementError(f"{part}: waits for the prefill curve")
                fitted.grid = fit_grid(self._plan, self._samples, fitted.prefill)
            case Part.RESTORE:
                key = self._sampler.key
                fitted.restore = fit_restore(self._plan, self._samples, key.kv_block_bytes / key.block_size)


_NAMES = {
    Part.PREFILL: "prefill",
    Part.GRID: "prefill by context",
    Part.RESTORE: "restores",
}
