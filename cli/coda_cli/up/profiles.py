"""The engines' profile: a stored one that they accept, or one measured now."""

from collections.abc import Sequence
from pathlib import Path

from coda_cli.errors import StackError
from coda_cli.profile_file import write_profile
from coda_cli.up.report import Report
from coda_engine.contract.errors import ContractError, ProfileRefusedError
from coda_engine.contract.profile import Profile, SpecKey
from coda_engine.contract.reasons import Feature
from coda_engine.profiling import (
    FULL,
    QUICK,
    EngineClient,
    EngineRequestError,
    MeasurementError,
    ProfilingError,
    measure_profile,
    needs_revalidation,
    revalidate,
    sample_file_path,
)

_MEASUREMENT_TRIES = 2


def stored_profile_file(cache: Path, key: SpecKey) -> Path:
    """Return where the profile of a specification is kept on this machine."""
    return cache / "profiles" / f"{key.digest()}.json"


def require_given_profile(file: Path, key: SpecKey) -> Profile:
    """Return the profile that a person names with ``--profile``.

    Raises:
        StackError: It cannot be read, or is for another specification.
    """
    try:
        profile = Profile.from_json(file.read_bytes())
    except (OSError, ContractError) as error:
        raise StackError(f"--profile {file}: cannot be read: {error}") from error
    if profile.full_key.spec != key:
        raise StackError(
            f"--profile {file}: was measured for another specification (profile {profile.full_key.spec}, this file "
            f"{key}); leave --profile out and it is measured here"
        )
    return profile


def provide_profile(
    clients: Sequence[EngineClient], stored: Path, given: Profile | None, quick: bool, report: Report
) -> None:
    """See to it that every engine runs with a profile of its own configuration; measure one if there is none.

    Args:
        clients: The running engines; nothing else uses them yet.
        stored: Where the profile is kept; engines load it when they start.
        given: A profile that a person asked for by name; never replaced by another one.
        quick: Whether to measure quickly.
        report: Gets a line for whatever happens.

    Raises:
        StackError: The given profile is refused, or the measurement failed.
    """
    try:
        if given is not None:
            _deliver(given, clients)
            report(f"profile {given.digest()} is in force, as given")
            return
        if _all_have_profile(clients) and _still_holds(clients, stored, report):
            report(f"the stored profile is in force ({stored})")
            return
        for reason in _refusals(clients):
            report(f"no usable profile is stored: {reason}")
        profile = _measure(clients[0], quick, stored, report)
        _deliver(profile, clients)
        write_profile(profile, stored)
        report(f"measured: {_summary(profile)}; kept in {stored}")
    except ProfileRefusedError as error:
        raise StackError(
            f"{'--profile' if given else 'the profile'}: the engine refused it: {error}; "
            "leave --profile out and it is measured here"
        ) from error
    except ProfilingError as error:
        raise StackError(
            f"spec.profiling.mode: Required, and the engine could not be measured: {error}. Try again on a quiet "
            "machine, or set it to Disabled (admission then stays first come, first served)"
        ) from error


def _all_have_profile(clients: Sequence[EngineClient]) -> bool:
    try:
        return all(client.profile() is not None for client in clients)
    except EngineRequestError as error:
        if error.status == 404:
            return False
        raise


def _still_holds(clients: Sequence[EngineClient], stored: Path, report: Report) -> bool:
    """Return whether the profile in force holds under the engines' versions; look at held-out points where they differ.

    A profile that was looked at again goes to every engine and into ``stored``.
    """
    for client in clients:
        in_force = client.profile()
        if in_force is None or not needs_revalidation(in_force, client):
            continue
        report(f"the stored profile was measured under other versions; checking it on {client.url} (about 20 s)")
        try:
            checked = revalidate(in_force, client, progress=lambda line: report(f"profile: {line}"))
        except MeasurementError as error:
            report(f"profile: {error}")
            return False
        _deliver(checked, clients)
        write_profile(checked, stored)
    return True


def _summary(profile: Profile) -> str:
    largest = profile.prefill.points[-1]
    worst = max(part.worst_error for part in profile.parts.values())
    restored = ""
    if profile.restore is not None:
        most = profile.restore.curves[0].points[-1]
        restored = f"{most.x / 1e6:,.0f} MB come back from the shadow in {most.ms:,.0f} ms, "
    return (
        f"{largest.x:,} tokens prefill in {largest.ms:,.0f} ms, {restored}held-out error {worst:.0%} "
        f"(bound {profile.prefill.error_bound:.0%})"
    )


def _refusals(clients: Sequence[EngineClient]) -> list[str]:
    """Return why the engines run without a profile, as they say it themselves."""
    reasons: dict[str, None] = {}
    for client in clients:
        capability = client.snapshot().capabilities.get(Feature.STATE_ADMISSION)
        if capability is not None and not capability.enabled:
            reasons[f"{capability.reason.value}{': ' if capability.detail else ''}{capability.detail}"] = None
    return list(reasons)


def _measure(client: EngineClient, quick: bool, stored: Path, report: Report) -> Profile:
    kind = "a quick profile (about 20 s)" if quick else "a full profile (some minutes)"
    report(f"measuring {kind} on {client.url}; the router starts afterwards")
    for remaining in range(_MEASUREMENT_TRIES - 1, -1, -1):
        try:
            return measure_profile(
                client,
                effort=QUICK if quick else FULL,
                progress=lambda line: report(f"profile: {line}"),
                samples_file=sample_file_path(stored),
            )
        except MeasurementError as error:
            if remaining == 0:
                raise
            report(f"profile: {error}; starting the measurement again")
    raise AssertionError("unreachable")


def _deliver(profile: Profile, clients: Sequence[EngineClient]) -> None:
    for client in clients:
        client.put_profile(profile)
