"""A profile as people keep it, a file, and as they read it, a table."""

from pathlib import Path

from coda_cli.errors import CliError
from coda_engine.contract.profile import MAX_PROFILE_BYTES, Profile


def write_profile(profile: Profile, file: Path) -> None:
    """Write ``profile`` to ``file`` in one move, so that no reader sees half of it.

    Raises:
        CliError: It is larger than a profile may be.
    """
    data = profile.model_dump_json(indent=1).encode() + b"\n"
    if len(data) > MAX_PROFILE_BYTES:
        raise CliError(f"the profile has {len(data)} bytes, more than the {MAX_PROFILE_BYTES} that a profile may have")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.writing")
    unfinished.write_bytes(data)
    unfinished.replace(file)


def profile_table(profile: Profile) -> str:
    """Return a profile the way a person reads it."""
    key, prefill = profile.full_key, profile.prefill
    lines = [
        f"profile {profile.digest()} for {key.spec.model} (spec key {key.spec.digest()})",
        f"  {key.hardware}, vLLM {key.vllm_version}, {key.attention_backend}, {key.max_batched_tokens} tokens a step, "
        f"context {key.max_context_tokens}",
        f"  measured {profile.provenance.measured_at} in {profile.provenance.duration_s:.0f} s"
        f"{' (quick)' if profile.provenance.quick else ''}",
        "  prefill tokens        ms   spread  tokens/s",
    ]
    lines += [
        f"  {point.x:>14,} {point.ms:>9.1f} {point.spread_ms:>8.1f} {point.x / point.ms * 1_000:>9,.0f}"
        for point in prefill.points
        if point.ms > 0
    ]
    lines += [
        f"  {point.x:>14,} {point.measured_ms:>9.1f}   held out: predicted {point.predicted_ms:.1f}, "
        f"off by {point.relative_error:.1%}"
        for point in prefill.held_out
    ]
    lines.append(f"  worst held-out error {prefill.worst_error:.1%}, bound {prefill.error_bound:.0%}")
    return "\n".join(lines)
