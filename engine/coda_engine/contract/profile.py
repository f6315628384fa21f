"""The profile artifact: what was measured once for a model x hardware x engine configuration.

Paper Appendix A: profiles are bound to the configuration that they were measured on. The *spec key*
is known before an engine exists (the operator finds or makes a profile by it); the *full key* is
computed by the engine itself and decides whether the profile is its own.
"""

from itertools import pairwise
from typing import Self

from pydantic import Field, field_validator, model_validator

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.models import WireModel, canonical_digest
from coda_engine.contract.reasons import Reason

PROFILE_SCHEMA_VERSION = 1
MAX_PROFILE_BYTES = 64 * 1024
MAX_X = 2**50
"""Largest tokens or bytes of a point."""

MIN_MEASURED_MS = 0.001
"""Shortest time that a held-out point may have taken: errors are relative to it."""


class SpecKey(WireModel):
    """What a CodaCluster's specification says about the configuration.

    Attributes:
        model: Hub id, or the name of a built-in or local model.
        model_revision: Hub revision, or a digest of a local folder; "" = not pinned.
        weights_dtype: vLLM's ``--dtype`` value.
        quantization: vLLM's ``--quantization`` value; "" for none.
        kv_dtype: vLLM's ``--kv-cache-dtype`` value.
        device: ``cpu`` or ``cuda``.
        device_product: GPU product as node labels name it; "" = not pinned (CPU: always "").
        device_count: GPUs of a replica, or CPU threads of the engine.
        engine: vLLM image or version that the specification names.
        engine_args: The specification's engine options that change what a step costs, as written there.
    """

    model: str
    model_revision: str = ""
    weights_dtype: str = "auto"
    quantization: str = ""
    kv_dtype: str = "auto"
    device: str = "cpu"
    device_product: str = ""
    device_count: int = 1
    engine: str = ""
    engine_args: str = ""

    def digest(self) -> str:
        """Return the key's digest; the label by which a stored profile is found."""
        return canonical_digest(self)


class FullKey(WireModel):
    """What the engine itself knows; every field but the soft ones must match.

    Attributes:
        spec: The spec key that the engine was started with.
        model_digest: Digest of the model's configuration and weight sizes.
        hardware: GPU name and memory, or CPU model and threads bound.
        vllm_version: Version of the vLLM distribution.
        adapter_digest: Digest of Coda's adapter code.
        block_size: Tokens in a KV block.
        attention_backend: vLLM's attention backend.
        graph_mode: CUDA graph mode of decode steps.
        max_batched_tokens: Token limit of a step.
        max_context_tokens: Context window, tokens.
        driver: Driver or kernel version (soft: a change asks for re-validation only).
    """

    spec: SpecKey
    model_digest: str
    hardware: str
    vllm_version: str
    adapter_digest: str
    block_size: int
    attention_backend: str
    graph_mode: str
    max_batched_tokens: int
    max_context_tokens: int
    driver: str = ""

    def mismatches(self, other: Self) -> list[str]:
        """Return the hard fields that differ as ``field: ours != theirs``, spec fields one by one."""
        ours, theirs = _flat(self), _flat(other)
        return [f"{name}: {ours[name]!r} != {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]


def _flat(key: FullKey) -> dict[str, object]:
    fields = key.model_dump(exclude={"driver", "spec"})
    return {f"spec.{name}": value for name, value in key.spec.model_dump().items()} | fields


class CurvePoint(WireModel):
    """One measured point of a cost curve: ``x`` in the curve's unit (tokens or bytes), median and spread in ms."""

    x: int = Field(ge=0, le=MAX_X)
    ms: float = Field(ge=0, allow_inf_nan=False)
    spread_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    repetitions: int = Field(default=1, ge=1)


class HeldOutPoint(WireModel):
    """A point that the curve was not built from: measured against predicted, milliseconds."""

    x: int = Field(ge=0, le=MAX_X)
    measured_ms: float = Field(ge=MIN_MEASURED_MS, allow_inf_nan=False)
    predicted_ms: float = Field(ge=0, allow_inf_nan=False)

    @property
    def relative_error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_ms - self.measured_ms) / self.measured_ms


class PrefillProfile(WireModel):
    """Prefill time against tokens without reusable KV (Appendix A), with its held-out check."""

    points: list[CurvePoint] = Field(min_length=2)
    held_out: list[HeldOutPoint] = Field(min_length=1)
    error_bound: float = Field(ge=0, allow_inf_nan=False)

    @field_validator("points")
    @classmethod
    def _sorted(cls, points: list[CurvePoint]) -> list[CurvePoint]:
        if any(left.x >= right.x for left, right in pairwise(points)):
            raise ValueError("points must have growing x")
        return points

    @property
    def worst_error(self) -> float:
        """Largest relative error of the held-out points."""
        return max(point.relative_error for point in self.held_out)


class Provenance(WireModel):
    """Where and when a profile was measured."""

    measured_at: str
    duration_s: float
    coda_version: str
    quick: bool


class Profile(WireModel):
    """The artifact. At most :data:`MAX_PROFILE_BYTES` as JSON."""

    schema_version: int = Field(default=PROFILE_SCHEMA_VERSION, ge=1, le=PROFILE_SCHEMA_VERSION)
    full_key: FullKey
    prefill: PrefillProfile
    provenance: Provenance

    @model_validator(mode="after")
    def _growing_cost(self) -> Self:
        if self.prefill.points[-1].ms <= self.prefill.points[0].ms:
            raise ValueError("prefill cost does not grow with tokens: the measurement was disturbed, measure again")
        return self

    def digest(self) -> str:
        """Return the digest that an engine running this profile reports."""
        return canonical_digest(self)

    def require_match(self, engine_key: FullKey) -> None:
        """Check that the profile was measured on this engine's configuration and held its own check.

        Raises:
            ProfileRefusedError: With the reason, and the fields that differ.
        """
        differences = engine_key.mismatches(self.full_key)
        if differences:
            raise ProfileRefusedError(
                Reason.PROFILE_MISMATCH,
                "the profile was measured on another configuration (engine != profile): " + "; ".join(differences),
            )
        if self.prefill.worst_error > self.prefill.error_bound:
            raise ProfileRefusedError(
                Reason.PROFILE_NOT_VALIDATED,
                f"held-out prefill points are off by {self.prefill.worst_error:.0%}, more than the bound of "
                f"{self.prefill.error_bound:.0%}",
            )
