"""The few fields that the router reads of a request's body; all else stays the bytes that it was."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from coda_router.errors import Refusal

ENGINE_CONTROL_FIELDS = (
    "session_id", "priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "request_id",
)  # fmt: skip
"""Body fields by which a client would speak to the engine past the router; vLLM prefers some to headers.

``request_id`` is the key under which vLLM stores a response: whoever chose it could put his own in another's place.
"""

MAX_MODEL_CHARS = 512
"""Longest name of a model: names are kept in the decision log and repeated in errors."""

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON, or nested beyond all use."""

MAX_FOUND_BYTES = 64 * 1024
"""Longest value that is replaced where it is found, instead of putting the outermost object together again."""

MAX_FIELDS = 256
"""Most fields of an outermost object that is put together again."""

MAX_COLONS = 128 * 1024
"""Most colons, each of which may be a field's, outside of the fields that the router knows: to list that many fields
costs some 50 milliseconds, and a hostile body could have millions."""

MAX_DECODED_BYTES = 64 * 1024
"""Longest value of a raw field that is decoded: none that the router can use comes near it."""

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
    previous_response_id: msgspec.Raw = _UNSET
    store: msgspec.Raw = _UNSET
    stream: msgspec.Raw = _UNSET
    session_id: msgspec.Raw = _UNSET
    priority: msgspec.Raw = _UNSET
    cache_salt: msgspec.Raw = _UNSET
    kv_transfer_params: msgspec.Raw = _UNSET
    ec_transfer_params: msgspec.Raw = _UNSET
    vllm_xargs: msgspec.Raw = _UNSET
    request_id: msgspec.Raw = _UNSET


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

    Only the outermost object is put together again; the values keep their bytes. Of a field that is there twice the
    last one stays, which is the one that an engine would take.

    Raises:
        Refusal: 400; a field's name is not text, or there are, or may be, more than 256 fields.
    """
    controls = [name for name in ENGINE_CONTROL_FIELDS if getattr(envelope, name) is not _UNSET]
    if not controls:
        return body
    try:
        fields = _outermost_fields(body)
    except NOT_JSON as error:
        raise Refusal(400, "invalid_json", f"the request body is not valid JSON: {error}") from error
    if fields is None:
        raise Refusal(
            400,
            "too_many_fields",
            f"the request body has too many fields to take {', '.join(controls)} out of it, which the router does not "
            f"pass on: send it without, or with at most {MAX_FIELDS} fields",
            param=controls[0],
        )
    return joined_object({name: value for name, value in fields.items() if name not in ENGINE_CONTROL_FIELDS})


def with_fields(body: bytes, envelope: Envelope, replaced: Mapping[str, bytes]) -> bytes:
    """Return ``body`` with the values of some fields of its envelope replaced; all else keeps its bytes.

    Raises one of ``NOT_JSON`` where a field's name is not text, or where there are too many fields.
    """
    formers = {name: bytes(getattr(envelope, name)) for name in replaced}
    for name, former in formers.items():
        start = body.find(former) if len(former) <= MAX_FOUND_BYTES else -1
        if start < 0 or body.find(former, start + 1) >= 0:
            # To find a long value costs more than to decode; one that is there twice cannot be found at all.
            if (fields := _outermost_fields(body)) is None:
                raise msgspec.DecodeError(f"more than {MAX_FIELDS} fields")
            return joined_object({**fields, **replaced})
        body = b"".join((memoryview(body)[:start], replaced[name], memoryview(body)[start + len(former) :]))
    return body


def _outermost_fields(body: bytes) -> dict[str, bytes] | None:
    """Return the undecoded fields of a body, None if there are, or may be, too many.

    Raises one of ``NOT_JSON`` where a field's name is not text.
    """
    colons = body.count(b":")
    if colons > MAX_COLONS:
        # Most are within texts and tools, which are one field each.
        values = (value for value in msgspec.structs.astuple(_decoder.decode(body)) if isinstance(value, msgspec.Raw))
        colons -= sum(bytes(value).count(b":") for value in values)
    if colons > MAX_COLONS:
        return None
    fields = _fields_decoder.decode(body)
    if len(fields) > MAX_FIELDS:
        return None
    return {name: bytes(value) for name, value in fields.items()}


def joined_object(fields: Mapping[str, bytes]) -> bytes:
    """Return a JSON object of fields whose values are JSON already."""
    pieces: list[bytes] = []
    for name, value in fields.items():
        # In pieces: a value may be a megabyte, and is to be copied once.
        pieces += (b",", msgspec.json.encode(name), b":", value)
    return b"".join([b"{", *pieces[1:], b"}"])


def asks_for_stream(envelope: Envelope) -> bool:
    """Return whether a request asks for its reply as a stream of events."""
    return bytes(envelope.stream) == b"true"


def offers_tools(envelope: Envelope) -> bool:
    """Return whether a request offers the model any tools."""
    return len(envelope.tools) > len("null")


def decoded(raw: msgspec.Raw) -> Any:
    """Return the value of a raw field; None where it is absent, not JSON, nested too deeply, or beyond 64 KiB."""
    if raw is _UNSET or len(raw) > MAX_DECODED_BYTES:
        return None
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON:
        return None
