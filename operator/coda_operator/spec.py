"""The CodaCluster that a person writes: every field with its documentation, default and limits.

The CRD's schema is generated from these models, ``coda up`` reads the same file, and a field is here only
if the code honours it.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from coda_engine.contract.models import AuthoredModel
from coda_engine.contract.owned_args import owned_argument_problems
from coda_engine.contract.profile import SpecKey
from coda_engine.contract.settings import AdmissionSettings, HygieneSettings, PlacementSettings, Settings

GROUP = "coda-serving.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CLUSTER_KIND = "CodaCluster"
PROFILE_KIND = "CodaProfile"

MAX_NAME_CHARS = 40
"""Longest name of a CodaCluster: its children's names must fit Kubernetes' 63 characters."""

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""What else a CodaCluster's name must be, as the API server and ``coda`` both check it."""

NAME_RULE = (
    f"at most {MAX_NAME_CHARS} characters of a-z, 0-9 and -, starting with a letter, "
    "because Services are named after it"
)
"""The two above in words."""

_QUANTITY = re.compile(r"^([0-9]+)(k|M|G|T|Ki|Mi|Gi|Ti)?$")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _is_quantity(text: str) -> str:
    if _QUANTITY.match(text) is None:
        raise ValueError("must be a whole number with k, M, G, T, Ki, Mi, Gi, Ti or nothing after it, for example 8Gi")
    return text


Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) and not isinstance(value, bool) else value),
    AfterValidator(_is_quantity),
    Field(json_schema_extra={"x-kubernetes-int-or-string": True, "pattern": _QUANTITY.pattern}),
]
"""Bytes as Kubernetes writes them: ``200M``, ``24Gi`` or a plain number."""

ModelName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]


def quantity_bytes(quantity: str) -> int:
    """Return the bytes of a Quantity that has passed validation."""
    match = _QUANTITY.match(quantity)
    if match is None:
        raise ValueError(f"not a quantity: {quantity!r}")
    return int(match[1]) * _UNITS[match[2] or ""]


class Device(StrEnum):
    """What an engine computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class ProfilingMode(StrEnum):
    """When the engines' configuration is measured."""

    REQUIRED = "Required"
    DISABLED = "Disabled"


class ShadowScope(StrEnum):
    """Who shares a CPU shadow."""

    POD = "Pod"
    NODE = "Node"


class ModelSource(AuthoredModel):
    """Where the model's files come from; exactly one."""

    hub: str | None = Field(default=None, description="Hugging Face id, for example Qwen/Qwen3-8B.")
    builtin: Literal["smollm2-135m-instruct"] | None = Field(
        default=None, description="A small real model that Coda makes from a package, for trials and tests."
    )
    host_path: str | None = Field(
        default=None,
        pattern=r"^/",
        description="Absolute folder on the node (or this machine) with a Hugging Face model.",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("hub", "builtin", "host_path") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of hub, builtin, hostPath; {len(given)} are set")
        return self


class ModelSpec(AuthoredModel):
    """The served model."""

    name: ModelName = Field(description="Name under which clients ask for the model.")
    served_names: list[ModelName] = Field(default_factory=list, max_length=16, description="Further names (aliases).")
    source: ModelSource
    revision: str = Field(default="", max_length=128, description="Hub revision; empty = the default branch.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(default="auto", description="Type of the weights.")
    quantization: str = Field(
        default="", max_length=64, description="vLLM's --quantization; empty = as the model says."
    )
    kv_cache_dtype: str = Field(default="auto", max_length=32, description="vLLM's --kv-cache-dtype.")
    max_context_tokens: int | None = Field(
        default=None, ge=128, le=16_777_216, description="Context window, tokens; default: the model's own."
    )
    tool_parser: str = Field(
        default="", max_length=64, description="vLLM's --tool-call-parser; empty = no automatic tool choice."
    )


class EngineSpec(AuthoredModel):
    """The vLLM engines."""

    image: str = Field(
        default="", max_length=512, description="Engine image; default: the one of the operator's release."
    )
    device: Device = Field(default=Device.CUDA, description="cuda or cpu.")
    replicas: int = Field(default=1, le=1024, description="Engines; at least 1.")
    gpus: int | None = Field(
        default=None, ge=1, le=16, description="GPUs of each engine (tensor parallel); device cuda, default 1."
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        max_length=128,
        description="Extended resource that counts GPUs (a MIG profile has its own).",
    )
    gpu_product: str = Field(
        default="",
        max_length=128,
        description="Node label nvidia.com/gpu.product to require, part of the profile's key.",
    )
    cpus: int | None = Field(default=None, ge=1, le=512, description="Threads of each engine; device cpu, default 1.")
    memory: Quantity | None = Field(
        default=None, description="Memory limit of the engine's pod, for example 8Gi; a CPU shadow's size comes on top."
    )
    kv_cache_size: Quantity | None = Field(
        default=None,
        description="Bytes of KV cache in HBM (or RAM for device cpu), for example 200M; default: vLLM decides.",
    )
    max_running: int | None = Field(
        default=None, ge=1, le=4096, description="Most requests in one step (vLLM's --max-num-seqs)."
    )
    max_batched_tokens: int | None = Field(
        default=None,
        ge=64,
        le=1_048_576,
        description="Most tokens in one step; default 512 for device cpu, else vLLM's own.",
    )
    extra_args: list[str] = Field(
        default_factory=list, max_length=64, description="Further vLLM arguments, except those that Coda owns."
    )
    pod_template: dict[str, Any] = Field(
        default_factory=dict, description="Strategic-merge patch of the engine's (and profiling Job's) pod template."
    )
    startup_timeout_seconds: int = Field(
        default=1200, ge=30, le=7200, description="Time an engine may take until it is ready."
    )

    @field_validator("replicas")
    @classmethod
    def _at_least_one(cls, replicas: int) -> int:
        if replicas < 1:
            raise ValueError("at least 1: this version has no scale-to-zero; set 1 or more, or delete the CodaCluster")
        return replicas

    @field_validator("extra_args")
    @classmethod
    def _no_owned_arguments(cls, extra_args: list[str]) -> list[str]:
        problems = owned_argument_problems(extra_args)
        if problems:
            raise ValueError("; ".join(problems))
        return extra_args

    @model_validator(mode="after")
    def _device_fields(self) -> Self:
        if self.device is Device.CPU and (self.gpus is not None or self.gpu_product):
            raise ValueError("gpus and gpuProduct are for device cuda; remove them or set device: cuda")
        if self.device is Device.CUDA and self.cpus is not None:
            raise ValueError("cpus is for device cpu; for device cuda set resources in podTemplate")
        return self

    @property
    def device_count(self) -> int:
        """GPUs of each engine, or CPU threads."""
        return (self.gpus or 1) if self.device is Device.CUDA else (self.cpus or 1)


class KvShadowSpec(AuthoredModel):
    """Finished KV blocks kept in host memory, from which sessions come back (paper section 6)."""

    size: Quantity | None = Field(
        default=None,
        description="Bytes of host memory for it, for example 4Gi, beside engine.memory: of each engine with scope "
        "Pod, of each node with scope Node; absent or 0 = no CPU shadow.",
    )
    scope: ShadowScope = Field(
        default=ShadowScope.POD,
        description="Pod: each engine has its own, which survives a restart of its container. Node: the engines of "
        "this CodaCluster on a node share one, in the node's /dev/shm, which outlives their pods; its namespace must "
        "admit hostPath volumes and an init container that runs as root.",
    )
    eviction: Literal["lru", "fifo"] = Field(
        default="lru", description="Which block makes room for a new one: least recently used, or first in."
    )

    @property
    def size_bytes(self) -> int:
        """Bytes of the shadow; 0 = none."""
        return quantity_bytes(self.size) if self.size is not None else 0


class ProfilingSpec(AuthoredModel):
    """Measuring the configuration before admission decisions are switched on (paper Appendix A)."""

    mode: ProfilingMode = Field(
        default=ProfilingMode.REQUIRED,
        description="Required: measured first, then served. Disabled: never; admission stays first come, first served.",
    )
    quick: bool = Field(default=False, description="Fewer points and repetitions (some seconds instead of minutes).")
    timeout_seconds: int = Field(default=1800, ge=60, le=86_400, description="Time the profiling Job may take.")


class RouterSpec(AuthoredModel):
    """The router in front of the engines."""

    image: str = Field(
        default="", max_length=512, description="Router image; default: the one of the operator's release."
    )
    replicas: int = Field(default=1, ge=1, le=64, description="Router processes; they share no state.")
    port: int = Field(default=8080, ge=1, le=65_535, description="Port of the router's Service (and of coda up).")
    api_key_secret: str | None = Field(
        default=None,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Secret of API keys: each entry is a key (its name is then the tenant) or a JSON document of one. "
        "Default: one with a single key is made, which stays when another is named.",
    )
    placement: PlacementSettings = PlacementSettings()
    hygiene: HygieneSettings = HygieneSettings()


class CodaClusterSpec(AuthoredModel):
    """A served model: engines, their admission, the router in front and the profile behind."""

    model: ModelSpec
    engine: EngineSpec = EngineSpec()
    kv_shadow: KvShadowSpec = KvShadowSpec()
    admission: AdmissionSettings = AdmissionSettings()
    profiling: ProfilingSpec = ProfilingSpec()
    router: RouterSpec = RouterSpec()

    @classmethod
    def parse(cls, spec: object) -> Self:
        """Return the specification in ``spec`` (a CodaCluster's ``spec`` as plain data).

        Raises:
            DocumentError: One line for each wrong field: its path, what is allowed, what was given.
        """
        return cls.from_plain(spec, "spec")

    def settings(self) -> Settings:
        """Return the settings document of this specification's engines and routers."""
        return Settings(admission=self.admission, placement=self.router.placement, hygiene=self.router.hygiene)

    def spec_key(self, engine_version: str) -> SpecKey:
        """Return the key by which this specification's profile is found.

        Args:
            engine_version: Engine image, or vLLM's version where engines are plain processes.
        """
        source = self.model.source
        return SpecKey(
            model=source.hub or source.builtin or source.host_path or "",
            model_revision=self.model.revision,
            weights_dtype=self.model.dtype,
            quantization=self.model.quantization,
            kv_dtype=self.model.kv_cache_dtype,
            device=self.engine.device.value,
            device_product=self.engine.gpu_product,
            device_count=self.engine.device_count,
            engine=engine_version,
            engine_args=self._engine_args(),
        )

    def _engine_args(self) -> str:
        """Return the options beyond the key's own fields by which an engine would refuse another's profile."""
        options = {
            "maxContextTokens": self.model.max_context_tokens,
            "maxBatchedTokens": self.engine.max_batched_tokens,
            "extraArgs": self.engine.extra_args or None,
            "kvShadow": "on" if self.kv_shadow.size_bytes else None,
        }
        return " ".join(f"{name}={value}" for name, value in options.items() if value is not None)
