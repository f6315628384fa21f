"""``coda_engine_*`` metrics, made at scrape time from the engine's pages; declared in ``telemetry.catalogue``."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

from fastapi import HTTPException
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.vllm_adapter.http.reader import PagesReader
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.telemetry.catalogue import CATALOGUE, PREFIX, MetricDeclaration, MetricKind, tier_label
from coda_engine.vllm_adapter.telemetry.histogram import HistogramState

Samples = Mapping[tuple[str, ...], float | HistogramState]
"""Values by label values."""


class EngineMetrics(Collector):
    """A collector that reads pages; it never asks the engine."""

    def __init__(self, reader: PagesReader) -> None:
        self._reader = reader

    def describe(self) -> Iterator[Metric]:
        """Return nothing: names are known only when there is something to collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the latest snapshot and measures; nothing while the engine publishes nothing."""
        try:
            return iter(self._families())
        except HTTPException:
            return iter(())
        except Exception as error:
            # An error here would take vLLM's own metrics with it.
            logger.warning("coda: metrics cannot be made: %s: %s", type(error).__name__, error)
            return iter(())

    def _families(self) -> list[Metric]:
        samples = snapshot_samples(EngineSnapshot.from_json(self._reader.snapshot().payload))
        measures = self._reader.measures()
        for group in (measures["values"], measures["histograms"]):
            for name, values in group.items():
                samples[name] = {(label,) if label else (): value for label, value in values.items()}
        found = ((declaration, samples.get(declaration.name.removeprefix(PREFIX))) for declaration in CATALOGUE)
        return [family(declaration, values) for declaration, values in found if values is not None]


def snapshot_samples(snapshot: EngineSnapshot) -> dict[str, Samples]:
    """Return what the snapshot tells, by the names of the catalogue without their prefix."""
    steps, reservation = snapshot.steps, snapshot.reservation
    by_label: dict[str, Mapping[str, float]] = {
        "admissions": steps.admissions,
        "admissions_by_path": steps.admissions_by_path,
        "admitted_tokens": steps.admitted_tokens,
        "cohort_plans": steps.cohort_plans,
        "reclaimed_blocks": steps.reclaimed,
        "shadow_pages": steps.shadow_pages,
        "steps": {"pure_decode": steps.pure_decode, "mixed": steps.mixed, "prefill": steps.prefill},
        "waiting_requests": _by_tier(snapshot.waiting_by_tier),
        "running_requests": _by_tier(snapshot.running_by_tier),
        "head_demand_blocks": _by_tier(snapshot.head_demand_blocks_by_tier),
        "settings_info": {snapshot.settings_digest: 1},
        "profile_info": {snapshot.profile_digest: 1} if snapshot.profile_digest else {},
    }
    plain = {
        "start_time_seconds": snapshot.started_at_s,
        "draining": snapshot.draining,
        "pending_prefill_tokens": snapshot.pending_prefill_tokens,
        "oldest_ready_wait_seconds": snapshot.oldest_ready_wait_ms / 1000.0,
        "kv_blocks": snapshot.kv_blocks_total,
        "kv_free_blocks": snapshot.kv_blocks_free,
        "untrusted_identities": steps.untrusted_identities,
        "reordered": steps.reordered,
        "refused_after_feasible": steps.refused_after_feasible,
        "reserved_blocks": reservation.kv_blocks if reservation is not None else 0,
        "reservation_wait_seconds": reservation.wait_ms / 1000.0 if reservation is not None else 0.0,
        "shadow_used_bytes": snapshot.shadow_bytes_used,
        "shadow_capacity_bytes": snapshot.shadow_bytes_capacity,
        "shadow_outstanding_restore_bytes": snapshot.outstanding_restore_bytes,
        "shadow_failed_restores": steps.failed_restores,
    }
    samples: dict[str, Samples] = {name: {(): float(value)} for name, value in plain.items()}
    for name, values in by_label.items():
        samples[name] = {(label,): float(value) for label, value in values.items()}
    samples["capability"] = {
        (feature.value, state.reason.value): float(state.enabled) for feature, state in snapshot.capabilities.items()
    }
    return samples


def _by_tier(values: Mapping[int, int]) -> dict[str, float]:
    """Return the values by label; those that share one are added up."""
    by_label: Counter[str] = Counter()
    for tier, value in values.items():
        by_label[tier_label(tier)] += value
    return dict(by_label)


def family(declaration: MetricDeclaration, samples: Samples) -> Metric:
    """Return the metric with its samples."""
    names = tuple(label.name for label in declaration.labels)
    if declaration.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(declaration.name, declaration.text, labels=names)
        bounds = [*(str(bound) for bound in declaration.bounds), "+Inf"]
        for labels, state in samples.items():
            assert not isinstance(state, int | float)  # noqa: S101 - the catalogue says histogram
            cumulative = list(accumulate(state["counts"]))
            histogram.add_metric(labels, list(zip(bounds, cumulative, strict=True)), sum_value=state["total"])
        return histogram
    kinds = {MetricKind.COUNTER: CounterMetricFamily, MetricKind.GAUGE: GaugeMetricFamily}
    metric = kinds[declaration.kind](declaration.name, declaration.text, labels=names)
    for labels, value in samples.items():
        metric.add_metric(labels, value)
    return metric
