"""Another driver or patch version under a measured engine: its held-out points are looked at again."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.measured import CheckedCosts, HeldOutPoint
from coda_engine.contract.profile import MAX_REVALIDATIONS, Profile, Revalidation, describe_miss
from coda_engine.contract.reasons import Reason
from coda_engine.profiling.engine import EngineClient
from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.fit import measured_again
from coda_engine.profiling.measure import Progress
from coda_engine.profiling.plan import Part, Spot
from coda_engine.profiling.sampler import Sampler

BUDGET_S = 20.0
"""About how long a look takes; a point whose prediction alone is longer than its share is left out."""

_MOST_ROUNDS = 5
_LONGEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Check:
    """A held-out point to look at again, and the part of the profile that it judges."""

    spot: Spot
    point: HeldOutPoint
    part: CheckedCosts


def needs_revalidation(profile: Profile, client: EngineClient) -> bool:
    """Return whether ``profile`` is the engine's own but for soft fields of the key that it was not checked under."""
    key = client.full_key()
    try:
        profile.require_match(key)
    except ProfileRefusedError:
        return False
    return bool(profile.soft_mismatches(key))


def revalidate(profile: Profile, client: EngineClient, *, progress: Progress) -> Profile:
    """Measure the profile's held-out points on a running engine and return it with the versions added that it held for.

    Args:
        profile: The engine's own but for soft fields of the key.
        client: The engine; nobody else uses it.
        progress: Gets a line for each round.

    Raises:
        ProfileRefusedError: The profile is another engine's.
        EngineRequestError: The engine is not there or has no plug-ins.
        EngineBusyError: Others use the engine.
        MeasurementError: A held-out point is off: a new profile has to be measured.
    """
    sampler = Sampler(client)
    profile.require_match(sampler.key)
    checks = _checks(profile)
    if not checks:
        raise ProfileRefusedError(
            Reason.PROFILE_NEEDS_REVALIDATION, f"no held-out point can be measured within {BUDGET_S:.0f} s"
        )
    progress(f"looking at {len(checks)} held-out points again")
    sampler.probe_ms()
    samples = _measure(sampler, checks, progress)
    worst = 0.0
    for check in checks:
        again = measured_again(check.spot, check.point, samples[check.spot])
        seen = check.part.model_copy(update={"held_out": [again]})
        if seen.misses():
            raise MeasurementError(
                f"{describe_miss(check.spot.part.value, check.part, again)}; the costs have changed with the versions "
                "underneath: measure a new profile (coda profile --fresh)"
            )
        worst = max(worst, seen.worst_error)
    return profile.model_copy(update={"revalidations": _with_this(profile, sampler, worst)})


def _with_this(profile: Profile, sampler: Sampler, worst_error: float) -> list[Revalidation]:
    entry = Revalidation(
        driver=sampler.key.driver,
        runtime=sampler.key.runtime,
        checked_at=datetime.now(UTC).isoformat(timespec="seconds"),
        worst_error=round(worst_error, 4),
    )
    return [*profile.revalidations, entry][-MAX_REVALIDATIONS:]


def _measure(sampler: Sampler, checks: list[_Check], progress: Progress) -> dict[Spot, list[float]]:
    """Return samples of every check's spot: at least one each, more rounds as long as they fit into the budget."""
    samples: dict[Spot, list[float]] = {check.spot: [] for check in checks}
    started_s = time.monotonic()
    for number in range(1, _MOST_ROUNDS + 1):
        began_s = time.monotonic()
        for spot in samples:
            samples[spot].append(sampler.sample_ms(spot))
        now_s = time.monotonic()
        left_s = max(0.0, BUDGET_S - (now_s - started_s))
        progress(f"round {number}: {now_s - started_s:.0f} s so far, at most {left_s:.0f} s left")
        if now_s - began_s > left_s:
            break
    return samples


def _checks(profile: Profile) -> list[_Check]:
    key = profile.full_key
    tokens_per_byte = key.block_size / key.kv_block_bytes if key.kv_block_bytes else 0.0
    checks = []
    for part in Part:
        costs: CheckedCosts | None = getattr(profile, part.value)
        for point in costs.held_out if costs is not None else []:
            if costs is None or point.predicted_ms > BUDGET_S * 1_000 * _LONGEST_SHARE:
                continue
            tokens = round(point.x * tokens_per_byte) if part is Part.RESTORE else point.x
            place: dict[str, Any] = {"context_tokens": point.context_tokens, "outstanding": point.outstanding}
            checks.append(_Check(Spot(part, tokens, held_out=True, **place), point, costs))
    return sorted(checks, key=lambda check: check.spot.part is not Part.PREFILL)
