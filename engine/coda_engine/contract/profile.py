"""The profile artifact: what was measured once for a model x hardware x engine configuration.

Paper Appendix A: profiles are bound to the configuration that they were measured on. The *spec key*
is known before an engine exists (the operator finds or makes a profile by it); the *full key* is
computed by the engine itself and decides whether the profile is its own.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, computed_field, model_validator

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.measured import CheckedCosts, CostCurve, HeldOutPoint, PrefillGrid, RestoreProfile
from coda_engine.contract.models import WireModel, canonical_digest
from coda_engine.contract.reasons import Reason

PROFILE_SCHEMA_VERSION = 2
"""1 had neither costs by context nor restores and is refused: such a profile is measured again in a minute."""

MAX_PROFILE_BYTES = 64 * 1024
MAX_REVALIDATIONS = 16

_SOFT_FIELDS = ("driver", "runtime")


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
        kv_block_bytes: Bytes of a KV block over all ranks.
        attention_backend: vLLM's attention backend.
        graph_mode: CUDA graph mode of decode steps.
        max_batched_tokens: Token limit of a step.
        max_context_tokens: Context window, tokens.
        shadow_layout: How the CPU shadow holds a page; "" = no shadow.
        transfer_topology: What lies between the shadow and HBM; "" = no shadow.
        driver: Driver or kernel version (soft: a change asks for re-validation only).
        runtime: Patch versions of the libraries under vLLM (soft).
    """

    spec: SpecKey
    model_digest: str
    hardware: str
    vllm_version: str
    adapter_digest: str
    block_size: int
    kv_block_bytes: int = 0
    attention_backend: str
    graph_mode: str
    max_batched_tokens: int
    max_context_tokens: int
    shadow_layout: str = ""
    transfer_topology: str = ""
    driver: str = ""
    runtime: str = ""

    def mismatches(self, other: Self) -> list[str]:
        """Return the hard fields that differ as ``field: ours != theirs``, spec fields one by one."""
        ours, theirs = _flat(self), _flat(other)
        return [f"{name}: {ours[name]!r} != {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]


def _flat(key: FullKey) -> dict[str, object]:
    fields = key.model_dump(exclude={"spec", *_SOFT_FIELDS})
    return {f"spec.{name}": value for name, value in key.spec.model_dump().items()} | fields


class Provenance(WireModel):
    """Where and when a profile was measured."""

    measured_at: str
    duration_s: float
    coda_version: str
    quick: bool


class Revalidation(WireModel):
    """Another driver or patch version under which the held-out points were measured again, and held.

    Attributes:
        driver: As in the full key.
        runtime: As in the full key.
        checked_at: When, ISO 8601.
        worst_error: Largest relative error of a held-out point then.
    """

    driver: str
    runtime: str
    checked_at: str
    worst_error: float = Field(ge=0, allow_inf_nan=False)


class Domain(WireModel):
    """Up to where costs were measured; beyond, the last segment is continued.

    Attributes:
        new_tokens: New tokens on no context.
        context_tokens: Context tokens under new ones; 0 without a prefill grid.
        restore_bytes: Bytes of one restore; 0 without a shadow.
        outstanding_bytes: Bytes of other restores that one waited for; 0 where none was measured.
    """

    new_tokens: int
    context_tokens: int
    restore_bytes: int
    outstanding_bytes: int


class Profile(WireModel):
    """The artifact. At most :data:`MAX_PROFILE_BYTES` as JSON.

    Attributes:
        schema_version: Version of this document's shape.
        full_key: The configuration that was measured.
        prefill: Prefill time by new tokens on no context: the paper's curve.
        prefill_grid: Prefill time by new tokens and context; None = the curve serves every context.
        restore: CPU-to-HBM restore time; None = no shadow.
        load: SSD-to-HBM time by bytes; None = no SSD tier.
        provenance: Where and when.
        revalidations: Under which other driver and patch versions it held, oldest first.
    """

    schema_version: int = Field(default=PROFILE_SCHEMA_VERSION, ge=1)
    full_key: FullKey
    prefill: CostCurve
    prefill_grid: PrefillGrid | None = None
    restore: RestoreProfile | None = None
    load: CostCurve | None = None
    provenance: Provenance
    revalidations: list[Revalidation] = Field(default_factory=list, max_length=MAX_REVALIDATIONS)

    @model_validator(mode="before")
    @classmethod
    def _known_schema(cls, document: object) -> object:
        schema = document.get("schema_version", PROFILE_SCHEMA_VERSION) if isinstance(document, Mapping) else None
        if isinstance(schema, int) and schema < PROFILE_SCHEMA_VERSION:
            raise ValueError(
                f"a profile of schema {schema} has no costs by context and of restores; measure again (coda profile)"
            )
        if isinstance(schema, int) and schema > PROFILE_SCHEMA_VERSION:
            raise ValueError(
                f"a newer Coda wrote this profile (schema {schema}, this one reads {PROFILE_SCHEMA_VERSION}); "
                "update Coda, or measure again (coda profile)"
            )
        return document

    @computed_field  # type: ignore[prop-decorator]
    @property
    def domain(self) -> Domain:
        """Up to where costs were measured."""
        curves = self.restore.curves if self.restore is not None else []
        return Domain(
            new_tokens=self.prefill.points[-1].x,
            context_tokens=self.prefill_grid.rows[-1].context_tokens if self.prefill_grid is not None else 0,
            restore_bytes=curves[0].points[-1].x if curves else 0,
            outstanding_bytes=max((curve.points[-1].x * curve.outstanding for curve in curves), default=0),
        )

    @property
    def parts(self) -> dict[str, CheckedCosts]:
        """The measured costs that it has, by field name."""
        named = {
            "prefill": self.prefill,
            "prefill_grid": self.prefill_grid,
            "restore": self.restore,
            "load": self.load,
        }
        return {name: part for name, part in named.items() if part is not None}

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
        misses = [describe_miss(name, part, miss) for name, part in self.parts.items() for miss in part.misses()]
        if misses:
            raise ProfileRefusedError(Reason.PROFILE_NOT_VALIDATED, "; ".join(misses) + "; measure again")

    def soft_mismatches(self, engine_key: FullKey) -> list[str]:
        """Return the soft fields that differ as ``field: engine's != profile's``; none where it was re-validated.

        A profile with soft mismatches is this engine's and in force, but its held-out points want another look.
        """
        ours, measured = _soft(engine_key), _soft(self.full_key)
        if ours in (measured, *map(_soft, self.revalidations)):
            return []
        return [
            f"{name}: {mine!r} != {its!r}"
            for name, mine, its in zip(_SOFT_FIELDS, ours, measured, strict=True)
            if mine != its
        ]


def describe_miss(name: str, part: CheckedCosts, miss: HeldOutPoint) -> str:
    """Return which held-out point of which part is predicted how badly."""
    where = f"{miss.x} bytes" if name in ("restore", "load") else f"{miss.x} tokens"
    if miss.context_tokens:
        where += f" on {miss.context_tokens} tokens of context"
    if miss.outstanding:
        where += f" beside {miss.outstanding} other restores"
    return (
        f"{name}: {miss.predicted_ms:.1f} ms are predicted for {where}, {miss.measured_ms:.1f} ms were measured: "
        f"off by {miss.relative_error:.0%}, more than the bound of {part.error_bound:.0%}"
    )


def _soft(key: FullKey | Revalidation) -> tuple[str, ...]:
    return tuple(getattr(key, name) for name in _SOFT_FIELDS)
