"""Attributes of one request's span, and their way from EngineCore to the process that makes the span.

vLLM sends a request's trace headers back with each of its outputs. So the attributes travel as one header more,
from the request's admission on; the receiver takes it out again before vLLM reads the headers.
"""

import json
from collections.abc import Mapping

from vllm.v1.request import Request

from coda_engine.vllm_adapter.identity.table import RequestIdentity
from coda_engine.vllm_adapter.scheduler.decisions import Decision, StatePath

CARRIER_HEADER = "coda-span-attributes"

Attributes = dict[str, str | int | float | bool]


def span_attributes(path: StatePath, identity: RequestIdentity, decision: Decision | None) -> Attributes:
    """Return what is known of a request when it is admitted; milliseconds, tokens, names hashed.

    Args:
        path: Where its tokens' KV comes from.
        identity: Who it is from; the session is told by its hash.
        decision: Why it was admitted; None while state admission is closed.
    """
    attributes: Attributes = {
        "coda.tier": identity.tier,
        "coda.tokens.hbm": path.hbm_tokens,
        "coda.tokens.shadow": path.shadow_tokens,
        "coda.tokens.prefill": path.prefill_tokens,
        "coda.path": path.kind.value,
    }
    if identity.session_key:
        attributes["coda.session"] = identity.session_key
    if decision is not None:
        attributes |= {
            "coda.admission.reason": decision.reason.value,
            "coda.admission.wait_ms": round(decision.wait_ms, 3),
            "coda.admission.state_cost_ms": round(decision.state_cost_ms, 3),
            "coda.admission.reordered": decision.reordered,
        }
    return attributes


def attach(request: Request, attributes: Attributes) -> None:
    """Send ``attributes`` with the request's outputs from now on."""
    request.trace_headers = {**(request.trace_headers or {}), CARRIER_HEADER: json.dumps(attributes)}


def detach(headers: Mapping[str, str] | None) -> tuple[Mapping[str, str] | None, Attributes]:
    """Return the client's own trace headers, None without any, and the attributes that came with them.

    Raises:
        ValueError: What came is not what :func:`attach` sends.
    """
    if headers is None or CARRIER_HEADER not in headers:
        return headers, {}
    own = {name: value for name, value in headers.items() if name != CARRIER_HEADER}
    attributes = json.loads(headers[CARRIER_HEADER])
    if not isinstance(attributes, dict):
        raise ValueError(f"{CARRIER_HEADER} holds no mapping")
    return own or None, attributes
