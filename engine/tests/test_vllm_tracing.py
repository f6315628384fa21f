"""Attributes on the span that vLLM's own output processor makes, with OpenTelemetry's own exporter."""

import json
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import output_processor as output_processor_module
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.vllm_adapter.identity.table import RequestIdentity
from coda_engine.vllm_adapter.scheduler.decisions import Decision, StatePath
from coda_engine.vllm_adapter.tracing.attributes import CARRIER_HEADER, detach, span_attributes
from coda_engine.vllm_adapter.tracing.spans import hook_spans

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
DECISION = Decision("r", AdmissionReason.LOWEST_AGED_COST, 12.3456, 78.9, 3, 2, reordered=True)
ATTRIBUTES = span_attributes(StatePath(32, 64, 8), RequestIdentity(session_key="5e55", tier=1), DECISION)


@pytest.fixture
def spans(monkeypatch):
    """The spans that were made, in memory."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    return exporter.get_finished_spans


@pytest.fixture
def module():
    """vLLM's module as it is, hooked for this test alone."""
    module = output_processor_module
    trace_requests, make_span = module.OutputProcessor.do_tracing, module.instrument_manual
    module.OutputProcessor.do_tracing = getattr(trace_requests, "__wrapped__", trace_requests)
    module.instrument_manual = getattr(make_span, "__wrapped__", make_span)
    hook_spans(module)
    yield module
    module.OutputProcessor.do_tracing, module.instrument_manual = trace_requests, make_span


def finish(module, headers) -> None:
    """End a request as the output processor does."""
    output = EngineCoreOutput(request_id="r", new_token_ids=[1], trace_headers=headers)
    state = SimpleNamespace(
        stats=RequestStateStats(arrival_time=1_000.0), prompt_token_ids=[1, 2, 3], prompt_embeds=None,
        external_req_id="r", top_p=None, max_tokens_param=5, temperature=None, n=1,
    )  # fmt: skip
    module.OutputProcessor.do_tracing(SimpleNamespace(), output, state, IterationStats())


def carried(headers=None) -> dict[str, str]:
    return {**(headers or {}), CARRIER_HEADER: json.dumps(ATTRIBUTES)}


def test_a_span_has_vllm_s_attributes_and_coda_s(module, spans):
    finish(module, carried())
    (span,) = spans()
    assert span.name == "llm_request"
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert {name: value for name, value in span.attributes.items() if name.startswith("coda.")} == {
        "coda.tier": 1,
        "coda.session": "5e55",
        "coda.path": "Shadow",
        "coda.tokens.hbm": 32,
        "coda.tokens.shadow": 64,
        "coda.tokens.prefill": 8,
        "coda.admission.reason": "LowestAgedCost",
        "coda.admission.wait_ms": 12.346,
        "coda.admission.state_cost_ms": 78.9,
        "coda.admission.reordered": True,
    }


def test_the_client_s_trace_goes_on(module, spans):
    finish(module, carried(TRACEPARENT))
    (span,) = spans()
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.attributes["coda.tier"] == 1


def test_one_request_s_attributes_do_not_reach_the_next(module, spans):
    finish(module, carried())
    finish(module, None)
    finish(module, TRACEPARENT)
    assert [span.attributes.get("coda.tier") for span in spans()] == [1, None, None]


@pytest.mark.parametrize("broken", ["{", "3", '"text"', "null"])
def test_attributes_that_cannot_be_read_cost_the_span_nothing(module, spans, broken):
    finish(module, {**TRACEPARENT, CARRIER_HEADER: broken})
    (span,) = spans()
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert not [name for name in span.attributes if name.startswith("coda.")]


def test_hooking_twice_adds_nothing(module, spans):
    before = module.OutputProcessor.do_tracing
    hook_spans(module)
    assert module.OutputProcessor.do_tracing is before
    finish(module, carried())
    assert len(spans()) == 1


def test_without_admission_and_session_only_what_is_known_is_told():
    assert span_attributes(StatePath(prefill_tokens=9), RequestIdentity(), None) == {
        "coda.tier": 0, "coda.path": "Recompute", "coda.tokens.hbm": 0, "coda.tokens.shadow": 0,
        "coda.tokens.prefill": 9,
    }  # fmt: skip


@pytest.mark.parametrize("headers", [None, {}, TRACEPARENT])
def test_headers_without_attributes_are_left_as_they_are(headers):
    assert detach(headers) == (headers, {})
