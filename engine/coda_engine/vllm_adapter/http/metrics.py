"""``coda_engine_*`` metrics, made at scrape time from the engine's pages."""

from collections.abc import Iterator
from itertools import accumulate

from fastapi import HTTPException
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.vllm_adapter.http.reader import PagesReader
from coda_engine.vllm_adapter.scheduler.decisions import SELECTION_BUCKETS_S
from coda_engine.vllm_adapter.telemetry.pages import DecisionsDocument


class EngineMetrics(Collector):
    """A collector that reads pages; it never asks the engine."""

    def __init__(self, reader: PagesReader) -> None:
        self._reader = reader

    def describe(self) -> Iterator[Metric]:
        """Return nothing: names are known only when there is something to collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the latest snapshot and decisions; nothing before the first."""
        try:
            snapshot = EngineSnapshot.from_json(self._reader.snapshot().payload)
            decisions = self._reader.decisions()
        except HTTPException:
            return
        yield from _snapshot_metrics(snapshot)
        yield _selection_seconds(decisions)


def _snapshot_metrics(snapshot: EngineSnapshot) -> Iterator[Metric]:
    steps = snapshot.steps
    yield _by_reason("coda_engine_admissions", "State-admission decisions by reason.", steps.admissions)
    yield _by_reason("coda_engine_cohort_plans", "Execution-admission plans by reason.", steps.cohort_plans)
    kinds = {"pure_decode": steps.pure_decode, "mixed": steps.mixed, "prefill": steps.prefill}
    yield _by_label("coda_engine_steps", "Scheduled steps by kind.", "kind", kinds)
    counters = {
        "coda_engine_reordered": ("Requests admitted before the native head.", steps.reordered),
        "coda_engine_refused_after_feasible": (
            "Requests found feasible that the allocator refused.", steps.refused_after_feasible,
        ),
        "coda_engine_untrusted_identities": (
            "Requests without an identity value signed by this cluster.", steps.untrusted_identities,
        ),
    }  # fmt: skip
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(name, text, value=value)
    capability = GaugeMetricFamily("coda_engine_capability", "1 when a feature runs.", labels=("feature", "reason"))
    for feature, state in snapshot.capabilities.items():
        capability.add_metric((feature.value, state.reason.value), float(state.enabled))
    yield capability
    wait_s = snapshot.oldest_ready_wait_ms / 1000.0
    yield GaugeMetricFamily("coda_engine_oldest_ready_wait_seconds", "Longest wait since readiness.", value=wait_s)


def _by_reason(name: str, text: str, counts: dict[str, int]) -> Metric:
    return _by_label(name, text, "reason", counts)


def _by_label(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _selection_seconds(decisions: DecisionsDocument) -> Metric:
    family = HistogramMetricFamily("coda_engine_selection_seconds", "Time of one selection.", labels=())
    cumulative = list(accumulate(decisions["selection_buckets"])) or [0] * (len(SELECTION_BUCKETS_S) + 1)
    bounds = [*(str(bound) for bound in SELECTION_BUCKETS_S), "+Inf"]
    family.add_metric((), list(zip(bounds, cumulative, strict=True)), sum_value=decisions["selection_seconds"])
    return family
