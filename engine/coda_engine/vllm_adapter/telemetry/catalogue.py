"""Every ``coda_engine_*`` metric, declared once: what the collector exports and what the guide's table says.

A label takes values of a fixed list only: never ids, never what a user wrote. Counters count since the engine's
start; Prometheus adds ``_total`` to their names and ``_bucket``, ``_count`` and ``_sum`` to those of histograms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from coda_engine.contract.reasons import (
    AdmissionReason,
    Feature,
    PlanReason,
    PreparationPath,
    Reason,
    ShadowEvent,
    VictimReason,
)
from coda_engine.policy.tool_use import ToolKind
from coda_engine.vllm_adapter.scheduler.decisions import SELECTION_BUCKETS_S
from coda_engine.vllm_adapter.telemetry.startup import STARTUP_BOUNDS_S


class MetricKind(StrEnum):
    """What a metric's value does."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label.

    Attributes:
        name: Its name.
        values: All that it can be; empty for a digest, of which there is one at a time.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """One metric.

    Attributes:
        name: Without the ending that Prometheus gives counters and histograms.
        kind: What its value does.
        text: One sentence.
        labels: Its labels, in order.
        bounds: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        """The name as Prometheus shows it."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


def tier_label(tier: int) -> str:
    """Return the label of a tier; those that hardly anybody has share one, or a client could make a series of each."""
    return str(tier) if tier <= _MAX_TIER_SHOWN else _OTHER_TIERS


def _label(name: str, values: Iterable[object]) -> Label:
    return Label(name, tuple(str(value) for value in values))


PREFIX = "coda_engine_"
"""How every name begins."""

_MAX_TIER_SHOWN = 7
_OTHER_TIERS = f"{_MAX_TIER_SHOWN + 1}+"
_TIER = _label("tier", (*range(_MAX_TIER_SHOWN + 1), _OTHER_TIERS))
_PATH = _label("path", PreparationPath)
_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


def _declare(
    name: str, kind: MetricKind, text: str, *labels: Label, bounds: tuple[float, ...] = ()
) -> MetricDeclaration:
    return MetricDeclaration(f"{PREFIX}{name}", kind, text, labels, bounds)


CATALOGUE: tuple[MetricDeclaration, ...] = (
    # The engine
    _declare("capability", _GAUGE, "1 when a feature runs, 0 when not, with the reason.",
             _label("feature", Feature), _label("reason", Reason)),
    _declare("settings_info", _GAUGE, "1 for the digest of the settings in force.", Label("digest")),
    _declare("profile_info", _GAUGE, "1 for the digest of the profile in force; absent without one.", Label("digest")),
    _declare("start_time_seconds", _GAUGE, "Unix time at which this instance started."),
    _declare("draining", _GAUGE, "1 when the engine takes no new requests."),
    _declare("waiting_requests", _GAUGE, "Waiting requests by tier (0 is the most urgent).", _TIER),
    _declare("running_requests", _GAUGE, "Running requests by tier.", _TIER),
    _declare("pending_prefill_tokens", _GAUGE, "Prompt tokens of waiting and prefilling requests to be computed."),
    _declare("oldest_ready_wait_seconds", _GAUGE, "Longest wait since readiness among waiting requests."),
    _declare("kv_blocks", _GAUGE, "KV blocks that requests can use."),
    _declare("kv_free_blocks", _GAUGE, "Of them those that are free or evictable."),
    _declare("head_demand_blocks", _GAUGE, "Blocks that the first waiting request of a tier still needs.", _TIER),
    _declare("steps", _COUNTER, "Scheduled steps by kind.", _label("kind", ("pure_decode", "mixed", "prefill"))),
    _declare("untrusted_identities", _COUNTER, "Requests without an identity value signed by this cluster."),
    # State admission
    _declare("admissions", _COUNTER, "State-admission decisions by reason; NothingFeasible admits nobody.",
             _label("reason", AdmissionReason)),
    _declare("admissions_by_path", _COUNTER, "Admitted requests by where most of their KV state came from.", _PATH),
    _declare("admitted_tokens", _COUNTER, "Tokens of admitted requests by where their KV state came from.", _PATH),
    _declare("reordered", _COUNTER, "Requests admitted before the native head."),
    _declare("refused_after_feasible", _COUNTER, "Requests found feasible that the allocator refused; should stay 0."),
    _declare("unconfirmed_selections", _COUNTER, "Choices taken back because vLLM's own state said otherwise."),
    _declare("selection_seconds", _HISTOGRAM, "Time of one selection.", bounds=SELECTION_BUCKETS_S),
    _declare("reserved_blocks", _GAUGE, "Blocks still needed by the request for which freed ones are kept; 0: nobody."),
    _declare("reservation_wait_seconds", _GAUGE, "How long that request has been ready; 0: nobody."),
    _declare("startup_seconds", _HISTOGRAM,
             "Time from admission to the first token of resumed requests (their session had an earlier one), by where "
             "most of the session's earlier KV state was found.", _PATH, bounds=STARTUP_BOUNDS_S),
    # Execution admission
    _declare("cohort_plans", _COUNTER, "Execution-admission plans by reason.", _label("reason", PlanReason)),
    # Reclaim
    _declare("reclaimed_blocks", _COUNTER, "Cached KV blocks given up while reclaim is on, by reason.",
             _label("reason", VictimReason)),
    _declare("victim_looks", _COUNTER, "Looks at the victim window."),
    _declare("victim_look_seconds", _COUNTER, "Time that they took together."),
    _declare("turns_ended", _COUNTER, "Replies by what they leave the session waiting for.",
             _label("followed_by", ("Tool", "Human"))),
    _declare("tool_gaps_open", _GAUGE, "Sessions that wait for a tool now, by its kind (of parallel tools the first).",
             _label("kind", ToolKind)),
    _declare("tools_learnt", _GAUGE, "Tools with gaps learnt online; 0 unless admission.reclaim.learnOnline."),
    # CPU shadow
    _declare("shadow_used_bytes", _GAUGE, "KV in the CPU shadow, by any engine that shares it."),
    _declare("shadow_capacity_bytes", _GAUGE, "Room of the CPU shadow; 0 without one."),
    _declare("shadow_pages_now", _GAUGE, "Pages by state; a page holds one KV block, all ranks counted once.",
             _label("state", ("used", "writing", "poisoned", "free"))),
    _declare("shadow_pinned_pages", _GAUGE, "Pages that this engine keeps from eviction while it restores them."),
    _declare("shadow_pages", _COUNTER, "Pages by what became of them.", _label("event", ShadowEvent)),
    _declare("shadow_failed_restores", _COUNTER, "Restores that ended at a page that could not be used."),
    _declare("shadow_outstanding_restore_bytes", _GAUGE, "Bytes of restores that have not ended."),
    _declare("shadow_restored_bytes", _COUNTER, "Bytes copied into HBM, all ranks together."),
    _declare("shadow_restore_seconds", _COUNTER, "Time of those copies, all ranks together."),
    _declare("shadow_published_bytes", _COUNTER, "Bytes copied out of HBM, all ranks together."),
    _declare("shadow_publish_seconds", _COUNTER, "Time of those copies, all ranks together."),
    _declare("shadow_index_repairs", _COUNTER, "Repairs of the index after another process died in a change of it."),
    _declare("shadow_lock_timeouts", _COUNTER, "Operations put off or refused because the index was locked too long."),
    # Sessions
    _declare("sessions", _GAUGE, "Sessions with KV in HBM or the CPU shadow."),
)  # fmt: skip
"""All metrics, in the order of the guide."""
