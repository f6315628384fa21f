"""Metrics from pages to Prometheus' text, and the guide that lists them; no vLLM, no engine."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coda_engine.contract.reasons import AdmissionReason, Feature, PreparationPath, Reason, ShadowEvent, VictimReason
from coda_engine.contract.snapshot import Capability, EngineSnapshot, Reservation, StepCounters
from coda_engine.vllm_adapter.http.metrics import EngineMetrics
from coda_engine.vllm_adapter.http.reader import PagesReader
from coda_engine.vllm_adapter.telemetry.catalogue import CATALOGUE, MetricKind, tier_label
from coda_engine.vllm_adapter.telemetry.guide import GUIDE, table, with_table
from coda_engine.vllm_adapter.telemetry.page import PageFiles, PageWriter, page_path
from coda_engine.vllm_adapter.telemetry.pages import CAPACITIES, MEASURES_PAGE, SNAPSHOT_PAGE
from coda_engine.vllm_adapter.telemetry.startup import STARTUP_BOUNDS_S

REPOSITORY = Path(__file__).resolve().parents[2]

SNAPSHOT = EngineSnapshot(
    instance_id="an-instance",
    version=1,
    published_at_s=10.0,
    started_at_s=1.0,
    capabilities={Feature.KV_SHADOW: Capability(enabled=False, reason=Reason.SHADOW_NO_SPACE, detail="a user's text")},
    settings_digest="5e77",
    waiting_by_tier={0: 2, 500: 1, 900: 3},
    requests_by_router={"a-router": 6},
    reservation=Reservation(tier=0, wait_ms=61_000.0, kv_blocks=12),
    shadow_bytes_used=4_096,
    steps=StepCounters(
        admissions={AdmissionReason.ONLY_CANDIDATE: 4},
        admissions_by_path={PreparationPath.SHADOW: 3},
        reclaimed={VictimReason.PREDICTED_IDLE: 7},
        shadow_pages={ShadowEvent.POISONED: 1, ShadowEvent.VANISHED: 2},
    ),
)
MEASURES = {
    "values": {"shadow_restored_bytes": {"": 640}, "tool_gaps_open": {"test": 2}, "of_a_newer_engine": {"": 1}},
    "histograms": {
        "startup_seconds": {"Shadow": {"counts": [0, 1, *[0] * (len(STARTUP_BOUNDS_S) - 1)], "total": 0.04}}
    },
}


@pytest.fixture
def files(tmp_path):
    return PageFiles.create(tmp_path, CAPACITIES)


@pytest.fixture
def scrape(files):
    """Returns the samples of a scrape: (name, labels as text) to value."""
    registry = CollectorRegistry()
    registry.register(EngineMetrics(PagesReader(files.prefix)))

    def samples() -> dict[str, float]:
        found = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    return samples


def publish(files, snapshot: bytes = SNAPSHOT.to_json(), measures: bytes | None = None) -> None:
    PageWriter(page_path(files.prefix, SNAPSHOT_PAGE)).write(1, snapshot)
    PageWriter(page_path(files.prefix, MEASURES_PAGE)).write(1, measures or json.dumps(MEASURES).encode())


def test_nothing_is_exported_before_the_engine_has_published(scrape):
    assert scrape() == {}


def test_decisions_reasons_and_bytes_are_exported(files, scrape):
    publish(files)
    found = scrape()
    for name, value in {
        "coda_engine_admissions_total{reason=OnlyCandidate}": 4,
        "coda_engine_admissions_by_path_total{path=Shadow}": 3,
        "coda_engine_reclaimed_blocks_total{reason=PredictedIdle}": 7,
        "coda_engine_shadow_pages_total{event=Poisoned}": 1,
        "coda_engine_shadow_pages_total{event=Vanished}": 2,
        "coda_engine_shadow_restored_bytes_total": 640,
        "coda_engine_shadow_used_bytes": 4_096,
        "coda_engine_tool_gaps_open{kind=test}": 2,
        "coda_engine_reserved_blocks": 12,
        "coda_engine_reservation_wait_seconds": 61,
        "coda_engine_capability{feature=KVShadow,reason=ShadowNoSpace}": 0,
        "coda_engine_settings_info{digest=5e77}": 1,
        "coda_engine_startup_seconds_bucket{le=0.025,path=Shadow}": 0,
        "coda_engine_startup_seconds_bucket{le=0.05,path=Shadow}": 1,
        "coda_engine_startup_seconds_bucket{le=+Inf,path=Shadow}": 1,
        "coda_engine_startup_seconds_count{path=Shadow}": 1,
        "coda_engine_startup_seconds_sum{path=Shadow}": 0.04,
    }.items():
        assert found[name] == value, name


def test_tiers_beyond_the_usual_share_one_series(files, scrape):
    publish(files)
    waiting = {name: value for name, value in scrape().items() if name.startswith("coda_engine_waiting_requests")}
    assert waiting == {"coda_engine_waiting_requests{tier=0}": 2, "coda_engine_waiting_requests{tier=8+}": 4}
    assert tier_label(7) == "7"


def test_neither_ids_nor_texts_are_exported(files, scrape):
    publish(files)
    exported = "".join(scrape())
    for private in ("an-instance", "a-router", "a user's text"):
        assert private not in exported


def test_every_exported_metric_is_declared_and_its_labels_are_on_the_list(files, scrape):
    publish(files)
    declared = {metric.exported_name: metric for metric in CATALOGUE}
    seen = set()
    for sample in scrape():
        name, _, labels = re.sub(r"_(bucket|count|sum|created)(?=\{|$)", "", sample).partition("{")
        metric = declared[name]
        seen.add(name)
        given = dict(pair.split("=") for pair in labels.rstrip("}").split(",") if pair)
        given.pop("le", None)
        assert list(given) == sorted(label.name for label in metric.labels)
        for label in metric.labels:
            assert given[label.name] in label.values or not label.values
    assert "of_a_newer_engine" not in seen


def test_a_withdrawn_page_ends_the_metrics(files, scrape):
    publish(files, snapshot=b"")
    assert scrape() == {}


def test_documents_that_cannot_be_read_end_coda_s_metrics_and_nobody_else_s(files, scrape):
    publish(files, measures=b'{"values": 3}')
    assert scrape() == {}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_declarations_follow_prometheus_conventions(metric):
    assert re.fullmatch(r"coda_engine_[a-z][a-z_]*[a-z]", metric.name)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_milliseconds"))
    assert metric.text.endswith((".", "0.", "nobody."))
    assert (metric.kind is MetricKind.HISTOGRAM) == bool(metric.bounds)
    assert list(metric.bounds) == sorted(metric.bounds)
    assert len({label.name for label in metric.labels}) == len(metric.labels)


def test_no_metric_is_declared_twice():
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)


def test_the_guide_lists_every_metric_as_declared():
    guide = (REPOSITORY / GUIDE).read_text(encoding="utf-8")
    assert guide == with_table(guide)
    assert all(f"`{metric.exported_name}`" in table() for metric in CATALOGUE)


def test_queries_of_the_guide_name_metrics_that_exist():
    guide = (REPOSITORY / GUIDE).read_text(encoding="utf-8")
    suffixes = ("", "_bucket", "_count", "_sum")
    known = {metric.exported_name + suffix for metric in CATALOGUE for suffix in suffixes}
    named = {name for name in re.findall(r"coda_engine_[a-z_]+", guide) if not name.endswith("_")}
    assert named <= known


def test_a_guide_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="two lines"):
        with_table("# Metrics\n")
