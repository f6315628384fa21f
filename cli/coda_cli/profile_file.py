"""A profile as people keep it, a file, and as they read it, a table or a page."""

from collections.abc import Iterator
from pathlib import Path

from coda_cli.errors import CliError
from coda_engine.contract.errors import DocumentError
from coda_engine.contract.measured import CheckedCosts, CurvePoint, HeldOutPoint
from coda_engine.contract.profile import MAX_PROFILE_BYTES, Profile
from coda_engine.profiling.report import report_page


def read_profile(file: Path) -> Profile:
    """Return the profile in ``file``.

    Raises:
        CliError: There is none, or it cannot be read; names the file.
    """
    try:
        return Profile.from_json(file.read_bytes())
    except (OSError, DocumentError) as error:
        raise CliError(f"{file}: is no profile that can be read: {error}") from error


def write_profile(profile: Profile, file: Path) -> None:
    """Write ``profile`` to ``file`` in one move, so that no reader sees half of it.

    Raises:
        CliError: It is larger than a profile may be.
    """
    data = profile.model_dump_json(indent=1).encode() + b"\n"
    if len(data) > MAX_PROFILE_BYTES:
        raise CliError(f"the profile has {len(data)} bytes, more than the {MAX_PROFILE_BYTES} that a profile may have")
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(data, file)


def write_report(profile: Profile, file: Path) -> None:
    """Write the profile's page (plots, bounds, held-out errors, keys) to ``file`` in one move."""
    _write(report_page(profile).encode(), file)


def profile_table(profile: Profile) -> str:
    """Return a profile the way a person reads it."""
    key, domain = profile.full_key, profile.domain
    lines = [
        f"profile {profile.digest()} for {key.spec.model} (spec key {key.spec.digest()})",
        f"  {key.hardware}, vLLM {key.vllm_version}, {key.attention_backend}, {key.max_batched_tokens} tokens a step, "
        f"context {key.max_context_tokens}",
        f"  measured {profile.provenance.measured_at} in {profile.provenance.duration_s:.0f} s"
        f"{' (quick)' if profile.provenance.quick else ''}, up to {domain.new_tokens:,} new tokens, "
        f"{domain.context_tokens:,} of context, {domain.restore_bytes / 1e6:,.0f} MB restored",
    ]
    lines += [
        f"  held again {check.checked_at} under {check.driver}, {check.runtime} (off by {check.worst_error:.1%})"
        for check in profile.revalidations
    ]
    return "\n".join([*lines, *_prefill(profile), *_grid(profile), *_restore(profile)])


def _prefill(profile: Profile) -> Iterator[str]:
    yield "  prefill tokens        ms   spread  tokens/s"
    for point in profile.prefill.points:
        yield f"{_row(point.x, point)} {point.x / point.ms * 1_000 if point.ms else 0:>9,.0f}"
    yield from _check(profile.prefill, 1)


def _grid(profile: Profile) -> Iterator[str]:
    grid = profile.prefill_grid
    if grid is None:
        yield "  prefill by context: not measured; the curve serves every context"
        return
    yield "  prefill tokens        ms   spread   on context of"
    for row in grid.rows:
        for point in row.points:
            yield f"{_row(point.x, point)} {row.context_tokens:>15,}"
    yield from _check(grid, 1)


def _restore(profile: Profile) -> Iterator[str]:
    restore = profile.restore
    if restore is None:
        yield "  restores: not measured, no shadow"
        return
    yield "  restore       MB        ms   spread   beside others"
    for curve in restore.curves:
        for point in curve.points:
            yield f"{_row(point.x / 1e6, point)} {curve.outstanding:>15,}"
    yield from _check(restore, 1e-6)


def _row(amount: float, point: CurvePoint) -> str:
    shown = f"{amount:,}" if isinstance(amount, int) else f"{amount:,.1f}"
    return f"  {shown:>14} {point.ms:>9.1f} {point.spread_ms:>8.1f}"


def _check(costs: CheckedCosts, scale: float) -> Iterator[str]:
    for point in costs.held_out:
        shown = f"{point.x:,}" if scale == 1 else f"{point.x * scale:,.1f}"
        yield (
            f"  {shown:>14} {point.measured_ms:>9.1f}   held out{_beside(point)}: predicted {point.predicted_ms:.1f}, "
            + ("within noise" if point.error_ms <= costs.resolution_ms else f"off by {point.relative_error:.1%}")
        )
    yield f"  worst held-out error {costs.worst_error:.1%}, bound {costs.error_bound:.0%}"


def _beside(point: HeldOutPoint) -> str:
    if point.context_tokens:
        return f" on {point.context_tokens:,}"
    return f" beside {point.outstanding}" if point.outstanding else ""


def _write(data: bytes, file: Path) -> None:
    unfinished = file.with_name(f".{file.name}.writing")
    unfinished.write_bytes(data)
    unfinished.replace(file)
