"""The settings document: policy knobs that change on a running engine or router without a restart.

One versioned document (ConfigMap or file at start, PUT on the internal endpoint afterwards); each process reports
the digest that it runs. The same models are the ``admission``, ``router.placement`` and ``router.hygiene`` groups of a
CodaCluster, so a knob is declared once.
"""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from coda_engine.contract.interface import FRONTIER_REQUESTS
from coda_engine.contract.models import AuthoredModel, canonical_digest

MAX_SETTINGS_BYTES = 64 * 1024
"""Largest settings document that a process takes."""


class StateAdmissionPolicyName(StrEnum):
    """Orders of the waiting queue that a live engine can run."""

    CODA = "coda"
    TIERED_AGING = "tiered-aging"
    CACHEWISE = "cachewise"
    SHORTEST_PREPARATION = "shortest-preparation"
    FIFO = "fifo"


class ExecutionAdmissionMode(StrEnum):
    """What the engine does with cohort plans of pure-decode steps."""

    DISABLED = "Disabled"
    OBSERVE = "Observe"


class StateAdmissionSettings(AuthoredModel):
    """Which ready request is prepared next (paper section 4.2).

    An absent constant is the policy's own: the paper's (Appendix A) for tiered-aging, calibrated ones for coda.
    """

    policy: StateAdmissionPolicyName = Field(
        default=StateAdmissionPolicyName.CODA,
        description="Order of the waiting queue. coda: cheapest preparation first, aged, requests that can still be "
        "on time before the others, every wait bounded. tiered-aging: exactly the paper's rules and constants. "
        "cachewise: fewest blocks to compute first, unbounded. shortest-preparation: cheapest first, unbounded. "
        "fifo: vLLM's own.",
    )
    tau_ms: int | None = Field(
        default=None,
        ge=1,
        le=3_600_000,
        description="Age at which waiting halves a request's preparation cost, milliseconds. Absent: 20000 for "
        "coda, 5000 for tiered-aging.",
    )
    max_wait_ms: int | None = Field(
        default=None,
        ge=1,
        le=3_600_000,
        description="Age from which the oldest request (tiered-aging: the oldest that fits) always goes first, "
        "milliseconds. Absent: 70000 for coda, 20000 for tiered-aging.",
    )
    on_time_ms: int | None = Field(
        default=None,
        ge=0,
        le=3_600_000,
        description="coda: target of the time to first token, milliseconds; requests that can still meet it go "
        "before those that cannot. 0: no difference is made. Absent: 4000.",
    )
    reserve_for_oldest: bool = Field(
        default=True,
        description="coda: keep freed KV blocks for the oldest request once it has waited maxWaitMs and does not "
        "fit. Without it the wait of a request that needs much of the KV cache has no bound.",
    )
    frontier: int = Field(
        default=FRONTIER_REQUESTS,
        ge=1,
        le=FRONTIER_REQUESTS,
        description="How many waiting requests one decision looks at, from the queue's head.",
    )


class ExecutionAdmissionSettings(AuthoredModel):
    """How a pure-decode step is grouped by context length (paper section 4.3 and Appendix A)."""

    mode: ExecutionAdmissionMode = Field(
        default=ExecutionAdmissionMode.DISABLED,
        description="Disabled: not considered. Observe: each pure-decode step is planned and the "
        "plan's reason counted, while attention still runs over the complete population.",
    )
    min_requests: int = Field(
        default=4, ge=2, le=4096, description="Fewest requests in a step for cohorts to be considered."
    )
    min_context_ratio: float = Field(
        default=1.5,
        ge=1.0,
        le=1_000_000,
        description="Smallest longest-to-shortest context ratio for cohorts to be considered.",
    )
    min_cohort: int = Field(
        default=2, ge=1, le=2048, description="Fewest requests in a cohort; at most half of minRequests."
    )
    min_share: float = Field(
        default=0.35, ge=0.01, le=0.5, description="Smallest share of the step's requests in a cohort."
    )
    launch_allowance_ms: float = Field(
        default=0.3, ge=0, le=1_000, description="Cost charged for the second attention launch, milliseconds."
    )
    min_gain: float = Field(
        default=0.05, ge=0, le=1, description="Smallest conservative relative gain for cohorts to run."
    )

    @model_validator(mode="after")
    def _cohorts_fit(self) -> Self:
        if self.min_cohort * 2 > self.min_requests:
            raise ValueError(
                f"minCohort {self.min_cohort} is more than half of minRequests {self.min_requests}, so no "
                f"step could be split; set minCohort <= {self.min_requests // 2} or minRequests >= "
                f"{self.min_cohort * 2}"
            )
        return self


class ReclaimPolicyName(StrEnum):
    """Orders in which a live engine gives up cached KV."""

    TOOL_AWARE = "tool-aware"
    LRU = "lru"
    CACHEWISE = "cachewise"
    IDLENESS = "idleness"


class ReclaimSettings(AuthoredModel):
    """Whose cached KV leaves HBM first when blocks are needed (paper section 6)."""

    policy: ReclaimPolicyName = Field(
        default=ReclaimPolicyName.TOOL_AWARE,
        description="Order within the victim window: tool-aware (published KV of the session predicted to stay away "
        "longest, by the tool it waits for), lru (vLLM's own), cachewise or idleness (those systems' orders).",
    )
    window_blocks: int = Field(
        default=4_096,
        ge=0,
        le=1_000_000,
        description="How many free KV blocks a choice looks at, from the least recently used; 0 = vLLM's own order.",
    )
    learn_online: bool = Field(
        default=False,
        description="Fit the tools' times to this engine's own sessions (an extension of the paper, which predicts "
        "from a fixed prior).",
    )


class AdmissionSettings(AuthoredModel):
    """What an engine decides: both admissions, and what leaves HBM for them."""

    state: StateAdmissionSettings = StateAdmissionSettings()
    execution: ExecutionAdmissionSettings = ExecutionAdmissionSettings()
    reclaim: ReclaimSettings = ReclaimSettings()


class PlacementPolicyName(StrEnum):
    """Placement policies that a live router can run."""

    CODA = "coda"
    SMETRIC = "smetric"
    SMETRIC_V2 = "smetric-v2"
    CACHEWISE_RR = "cachewise-rr"
    PREFIX_HASH = "prefix-hash"
    POWER_OF_TWO = "power-of-two"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class PlacementSettings(AuthoredModel):
    """How the router places a request on an engine (paper section 5)."""

    policy: PlacementPolicyName = Field(
        default=PlacementPolicyName.CODA,
        description="Where a request goes. coda: KV affinity within a load bound, then context compatibility at "
        "minimum load. smetric: its parent policy, home again while that is worth it, else minimum load. smetric-v2: "
        "home again while home can answer in time, else least work. cachewise-rr: new sessions in turn, then always "
        "home. prefix-hash: consistent hashing of sessions with bounded loads. power-of-two: the less loaded of two "
        "drawn engines. least-loaded, round-robin: neither looks at sessions.",
    )
    overload_bound: float = Field(
        default=2.0,
        ge=1.0,
        le=100.0,
        description="A session leaves its home engine when that engine's load exceeds this multiple of the other "
        "engines' mean load (smetric, prefix-hash: of all engines' mean load; smetric-v2: only where an engine has no "
        "telemetry). The others know no bound.",
    )


class HygieneSettings(AuthoredModel):
    """What the router keeps out of a prompt's prefix because no two requests share it."""

    billing_line: bool = Field(
        default=True,
        description="Take Claude Code's attribution line (x-anthropic-billing-header) from the beginning of the system "
        "prompt, where it differs between sessions and sub-agents.",
    )
    rolling_markers: bool = Field(
        default=True,
        description="Keep Claude Code's count-down (<total_tokens>) out of the system prompt: on /v1/messages each "
        "marker moves to the end of the user's text or tool's result before it; markers at the end of a system prompt, "
        "where a gateway has put them, are removed.",
    )


class Settings(AuthoredModel):
    """The whole document.

    Attributes:
        version: Schema version of the document.
    """

    version: int = Field(default=1, ge=1, le=1)
    admission: AdmissionSettings = AdmissionSettings()
    placement: PlacementSettings = PlacementSettings()
    hygiene: HygieneSettings = HygieneSettings()

    def digest(self) -> str:
        """Return the digest that a process running these settings reports."""
        return canonical_digest(self)

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """Return the settings in a JSON document.

        Raises:
            DocumentError: not JSON, an unknown field or an impossible value; names each field.
        """
        return cls.from_authored_json(data, "settings")
