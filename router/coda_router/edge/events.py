"""What the router itself says in a reply's stream of events: that it lives, and what went wrong."""

import secrets
import time
from typing import Any

import msgspec

from coda_router.edge.protocols import Dialect, EventForm, error_body
from coda_router.envelope import NOT_JSON
from coda_router.errors import Refusal

KEEP_ALIVE_S = 10.0
"""Silence after which a stream says that it lives; before the first byte, errors keep their status as long.

It is noticed a quarter of this later at most: the client hears something every 15 s.
"""

_COMMENT = b": keep-alive\n\n"
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_DONE = b"data: [DONE]\n\n"
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")

LONGEST_EVENT_END_BYTES = max(map(len, _EVENT_ENDS))
"""Bytes at a stream's end that tell whether its last event is complete."""

_PASSING_STATUSES = frozenset({408, 425, 429})


def ends_event(tail: bytes) -> bool:
    """Return whether a stream that ends with ``tail`` is between two events; one of nothing is."""
    return not tail or tail.endswith(_EVENT_ENDS)


def keep_alive_event(form: EventForm) -> bytes:
    """Return what keeps a silent stream's connection open and says nothing."""
    return _PING if form is EventForm.MESSAGES else _COMMENT


def is_passing(status: int) -> bool:
    """Return whether the same request may succeed when it is made again."""
    return status >= 500 or status in _PASSING_STATUSES


def error_event(form: EventForm, refusal: Refusal, model: str) -> bytes:
    """Return a refusal as the stream's last event.

    Args:
        form: Whose events.
        refusal: What went wrong.
        model: Name of the model that was asked for.
    """
    if form is EventForm.MESSAGES:
        return b"event: error\ndata: %b\n\n" % error_body(refusal, Dialect.ANTHROPIC)
    if form is EventForm.COMPLETIONS:
        return b"data: %b\n\n" % error_body(refusal, Dialect.OPENAI)
    return _failed_response(refusal.status, refusal.code, refusal.message, model)


def engine_error_event(form: EventForm, status: int, body: bytes, model: str) -> bytes:
    """Return an engine's error reply, for which it is too late, as the stream's last event.

    Args:
        form: Whose events.
        status: The reply's status.
        body: The reply's body, in the protocol's own shape of an error unless the engine is broken.
        model: Name of the model that was asked for.
    """
    document = _object(body)
    error = document.get("error")
    if not isinstance(error, dict):
        said = f"the engine's reply (status {status}) is not the stream that was asked for"
        return error_event(form, Refusal(max(status, 500), "engine_error", said), model)
    if form is EventForm.RESPONSES:
        return _failed_response(status, error.get("code"), str(error.get("message", "")), model)
    kind = b"event: error\n" if form is EventForm.MESSAGES else b""
    return b"%bdata: %b\n\n" % (kind, msgspec.json.encode(document))


def closing_events(form: EventForm) -> bytes:
    """Return what ends a whole stream after an error, as vLLM ends it."""
    return _DONE if form is EventForm.COMPLETIONS else b""


def _failed_response(status: int, code: object, message: str, model: str) -> bytes:
    """Return ``response.failed``. Its codes are the protocol's own; one of overload would be fatal to some clients."""
    if status >= 500:
        code = "server_error"
    elif status == 429:
        code = "rate_limit_exceeded"
    elif not isinstance(code, str):
        code = "invalid_prompt"
    response: dict[str, Any] = {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "failed",
        "error": {"code": code, "message": message},
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }
    event = {"type": "response.failed", "sequence_number": 0, "response": response}
    return b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event)


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except NOT_JSON:
        return {}
    return document if isinstance(document, dict) else {}
