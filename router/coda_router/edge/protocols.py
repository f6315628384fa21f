"""The endpoints that are proxied, and the shape in which each protocol expects an error."""

import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from coda_router.errors import Refusal


class Dialect(StrEnum):
    """Whose error shape an endpoint's clients understand."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class EventForm(StrEnum):
    """Whose events a stream consists of."""

    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One proxied endpoint.

    Attributes:
        path: As clients and engines know it.
        dialect: Its error shape.
        makes_kv: Whether its requests leave KV behind that the session comes back to.
        method: The one HTTP method that it takes.
        stores_responses: Whether its replies may be stored by their engine and continued by later requests.
        events: Whose events its replies consist of when a client asks for a stream; None = there are none.
    """

    path: str
    dialect: Dialect = Dialect.OPENAI
    makes_kv: bool = True
    method: str = "POST"
    stores_responses: bool = False
    events: EventForm | None = None


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", events=EventForm.COMPLETIONS),
        Endpoint("/v1/completions", events=EventForm.COMPLETIONS),
        Endpoint("/v1/responses", stores_responses=True, events=EventForm.RESPONSES),
        Endpoint("/v1/messages", Dialect.ANTHROPIC, events=EventForm.MESSAGES),
        Endpoint("/v1/messages/count_tokens", Dialect.ANTHROPIC, makes_kv=False),
        Endpoint("/v1/embeddings", makes_kv=False),
        Endpoint("/tokenize", makes_kv=False),
    )
}

STORED_RESPONSE = Endpoint("/v1/responses/{id}", makes_kv=False, method="GET", events=EventForm.RESPONSES)
CANCELLED_RESPONSE = Endpoint("/v1/responses/{id}/cancel", makes_kv=False)
"""What can be asked about one stored response; vLLM offers no way to delete one."""

STORED_RESPONSE_PREFIX = "/v1/responses/"
_ABOUT_RESPONSE = re.compile(r"/v1/responses/([\w.:-]{1,128})(/cancel)?", re.ASCII)


def about_response(path: str) -> tuple[Endpoint, str] | None:
    """Return the endpoint about one stored response and that response's id; None if the path is no such endpoint's."""
    found = _ABOUT_RESPONSE.fullmatch(path)
    if found is None:
        return None
    return CANCELLED_RESPONSE if found[2] else STORED_RESPONSE, found[1]


_OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "service_unavailable",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(refusal: Refusal, dialect: Dialect) -> bytes:
    """Return the JSON that clients of ``dialect`` expect of an error."""
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(refusal.status, "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": refusal.message}})
    kind = _OPENAI_TYPES.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return msgspec.json.encode({"error": error})
