"""A real server (three processes) with a CPU shadow: every family of metrics, and spans in a collector's hands."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from shadow_engine_harness import shadow_folder
from test_vllm_server import WAIT_S, Server, put_own_profile, signed, start_server

from coda_engine.contract import interface
from coda_engine.contract.identity import SESSION_HEADER
from coda_engine.contract.reasons import Feature
from coda_engine.contract.snapshot import session_key
from coda_engine.vllm_adapter.telemetry.catalogue import CATALOGUE, MetricKind

SPAN = "llm_request"
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog", "house", "tree")

Spans = list[dict[str, object]]


@contextmanager
def collector() -> Iterator[tuple[str, Spans]]:
    """An OTLP collector on loopback: its address, and the attributes of the request spans that it was sent."""
    spans: Spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(attributes(span) for span in scope.spans if span.name == SPAN)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    def attributes(span) -> dict[str, object]:
        return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def traced(model_folder, tmp_path_factory):
    """The module's server and what its collector got; its whole process group is ended at the end."""
    folder = tmp_path_factory.mktemp("metrics")
    with collector() as (address, spans), shadow_folder() as shadow:
        environment = {
            interface.ENV_SHADOW_BYTES: "600000000",
            interface.ENV_SHADOW_DIR: str(shadow),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        server = start_server(model_folder, folder, "--otlp-traces-endpoint", address, **environment)
        try:
            assert put_own_profile(server)[1][0] == 200
            yield server, spans
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait(10)


def text(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def complete(server: Server, session: str, prompt: str) -> None:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, answer = server.call("POST", "/v1/completions", body, signed(session, tier=1))
    assert status == 200, answer


def forget_hbm(server: Server) -> None:
    """Empty HBM as soon as nothing is under way."""
    when(lambda: server.call("POST", interface.HBM_FORGET_PATH)[0] == 200)


def when(holds: Callable[[], object]) -> object:
    """Return what ``holds`` returns as soon as it is true, within half a minute."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return found


def scrape(server: Server) -> dict[str, float]:
    """Return Coda's samples: name and label values (buckets left out) to value."""
    status, page = server.call("GET", "/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(page):
        if family.name.startswith("coda_engine_"):
            for sample in family.samples:
                if "le" not in sample.labels:
                    found[" ".join((sample.name, *sample.labels.values()))] = sample.value
    return found


def test_a_resumed_session_s_way_shows_in_metrics_and_spans(traced):
    server, spans = traced
    history = text(1, 500)
    complete(server, "s", history)
    complete(server, "s", history + text(2, 20))
    forget_hbm(server)
    complete(server, "s", history + text(3, 20))
    forget_hbm(server)
    complete(server, "s", text(4, 500))
    paths = [f"coda_engine_startup_seconds_count {path}" for path in ("HBM", "Shadow", "Recompute")]
    when(lambda: sum(scrape(server)[path] for path in paths) == 3)
    found = scrape(server)
    assert [found[path] for path in paths] == [1, 1, 1]
    assert min(found[f"coda_engine_startup_seconds_sum {path}"] for path in ("HBM", "Shadow", "Recompute")) > 0
    assert found["coda_engine_admitted_tokens_total Shadow"] >= 480
    when(lambda: len(spans) >= 4)
    assert [span["coda.path"] for span in spans] == ["Recompute", "HBM", "Shadow", "Recompute"]
    assert {span["coda.session"] for span in spans} == {session_key("alice", "s")}
    assert {span["coda.tier"] for span in spans} == {1}
    assert spans[2]["coda.tokens.shadow"] >= 480
    assert spans[2]["coda.admission.reason"] == "OnlyCandidate"
    assert spans[2]["gen_ai.usage.completion_tokens"] == 4
    assert "alice" not in str(spans)


def test_reclaim_and_tool_gaps_show_in_metrics(traced):
    server, _ = traced
    turn = {"session_id": signed("s")[SESSION_HEADER], "tools": [{"name": "Bash", "command": "pytest -q"}]}
    assert server.call("POST", interface.TURNS_PATH, turn)[0] == 200
    for number in range(3):
        complete(server, f"big{number}", text(10 + number, 2_000))
    found = when(lambda: (now := scrape(server)).get("coda_engine_tool_gaps_open test") and now)
    assert found["coda_engine_turns_ended_total Tool"] == 1
    reclaimed = {name: value for name, value in found.items() if name.startswith("coda_engine_reclaimed_blocks_total")}
    assert sum(reclaimed.values()) > 0
    assert found["coda_engine_victim_looks_total"] > 0


def test_every_declared_family_is_there_and_the_shadow_s_figures_are_right(traced):
    server, _ = traced
    page = server.call("GET", "/metrics")[1]
    for metric in CATALOGUE:
        assert f"# TYPE {metric.exported_name} {metric.kind}" in page, metric.name
    found = scrape(server)
    unlabelled = [metric for metric in CATALOGUE if not metric.labels and metric.kind is not MetricKind.HISTOGRAM]
    assert {metric.exported_name for metric in unlabelled} <= found.keys()
    assert found["coda_engine_capability KVShadow Enabled"] == 1
    assert found["coda_engine_capability TraceAttributes Enabled"] == 1
    assert found["coda_engine_shadow_used_bytes"] > 0
    assert (
        found["coda_engine_shadow_pages_total Restored"] * 1_474_560 == found["coda_engine_shadow_restored_bytes_total"]
    )
    assert found["coda_engine_shadow_restore_seconds_total"] > 0
    assert found["coda_engine_shadow_pages_total Poisoned"] == found["coda_engine_shadow_failed_restores_total"] == 0
    assert found["coda_engine_refused_after_feasible_total"] == 0
    assert found["coda_engine_selection_seconds_count"] > 0
    assert sum(value for name, value in found.items() if name.startswith("coda_engine_settings_info ")) == 1
    assert sum(value for name, value in found.items() if name.startswith("coda_engine_profile_info ")) == 1


def test_the_snapshot_tells_the_same(traced):
    server, _ = traced
    snapshot = server.snapshot()
    assert snapshot.capabilities[Feature.KV_SHADOW].enabled
    assert snapshot.steps.shadow_pages["Restored"] == scrape(server)["coda_engine_shadow_pages_total Restored"]
    assert 0 < snapshot.shadow_bytes_used <= snapshot.shadow_bytes_capacity
    assert snapshot.steps.admissions_by_path["Shadow"] == 1
