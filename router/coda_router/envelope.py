"""The few fields that the router reads of a request's body; all else stays the bytes that it was."""

import json
from typing import Annotated, Any

import msgspec

from coda_router.errors import Refusal

ENGINE_CONTROL_FIELDS = ("session_id", "priority", "cache_salt", "kv_transfer_params", "vllm_xargs")
"""Body fields by which a client would speak to the engine past the router; vLLM prefers some to headers."""

MAX_MODEL_CHARS = 512
"""Longest name of a model: names are kept in the decision log and repeated in errors."""

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON, or nested beyond all use."""

_UNSET = msgspec.Raw(b"")


class Envelope(msgspec.Struct, frozen=True):
    """A request body's outer shape. Raw fields are undecoded JSON, empty where absent.

    Everything that the engine itself judges is raw, so that its message reaches the client, not ours.
    """

    model: Annotated[str, msgspec.Meta(max_length=MAX_MODEL_CHARS)] | None = None
    messages: msgspec.Raw = _UNSET
    system: msgspec.Raw = _UNSET
    tools: msgspec.Raw = _UNSET
    prompt: msgspec.Raw = _UNSET
    input: msgspec.Raw = _UNSET
    instructions: msgspec.Raw = _UNSET
    metadata: msgspec.Raw = _UNSET
    prompt_cache_key: msgspec.Raw = _UNSET
    session_id: msgspec.Raw = _UNSET
    priority: msgspec.Raw = _UNSET
    cache_salt: msgspec.Raw = _UNSET
    kv_transfer_params: msgspec.Raw = _UNSET
    vllm_xargs: msgspec.Raw = _UNSET


_decoder = msgspec.json.Decoder(Envelope)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_envelope(body: bytes) -> Envelope:
    """Return the fields that the router needs.

    Raises:
        Refusal: 400; not a JSON object, nested beyond all use, or ``model`` is no string or too long a one.
    """
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        param = "model" if "$.model" in str(error) else None
        raise Refusal(400, "invalid_request", f"the request body does not fit: {error}", param=param) from error
    except NOT_JSON as error:
        raise Refusal(400, "invalid_json", f"the request body is not valid JSON: {error}") from error


def without_engine_controls(body: bytes, envelope: Envelope) -> bytes:
    """Return ``body`` itself, or, if it carries engine controls, the same object without them.

    Only the outermost object is put together again; the values keep their bytes.
    """
    if all(getattr(envelope, name) is _UNSET for name in ENGINE_CONTROL_FIELDS):
        return body
    kept = {
        name: bytes(value) for name, value in _fields_decoder.decode(body).items() if name not in ENGINE_CONTROL_FIELDS
    }
    return b"{" + b",".join(json.dumps(name).encode() + b":" + value for name, value in kept.items()) + b"}"


def decoded(raw: msgspec.Raw) -> Any:
    """Return the value of a raw field; None where it is absent, not JSON, or nested too deeply."""
    if raw is _UNSET:
        return None
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON:
        return None
