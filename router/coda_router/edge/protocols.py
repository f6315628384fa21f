"""The endpoints that are proxied, and the shape in which each protocol expects an error."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from coda_router.errors import Refusal


class Dialect(StrEnum):
    """Whose error shape an endpoint's clients understand."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One proxied endpoint.

    Attributes:
        path: As clients and engines know it.
        dialect: Its error shape.
        makes_kv: Whether its requests leave KV behind that the session comes back to.
    """

    path: str
    dialect: Dialect = Dialect.OPENAI
    makes_kv: bool = True


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions"),
        Endpoint("/v1/completions"),
        Endpoint("/v1/responses"),
        Endpoint("/v1/messages", Dialect.ANTHROPIC),
        Endpoint("/v1/messages/count_tokens", Dialect.ANTHROPIC, makes_kv=False),
        Endpoint("/v1/embeddings", makes_kv=False),
        Endpoint("/tokenize", makes_kv=False),
    )
}

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "api_error", 503: "service_unavailable"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
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
