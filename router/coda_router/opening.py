"""Names a conversation by its opening, for clients that send no session at all.

A conversation's later requests repeat its system prompt, tools and first user message, so these name it.
Clients re-serialise them between turns (blocks become strings, cache marks move), so text is hashed, not JSON.
Two conversations with the same opening share a name: a soft preference, which load overrules.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import xxhash

from coda_router.envelope import NOT_JSON, Envelope, decoded
from coda_router.hygiene.billing import without_billing_line

_PROMPT_OPENING_CHARS = 1_024


class _Message(msgspec.Struct, frozen=True):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"")


class _Function(msgspec.Struct, frozen=True):
    name: str = ""


class _Tool(msgspec.Struct, frozen=True):
    name: str = ""
    function: _Function = _Function()


_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_message_decoder = msgspec.json.Decoder(_Message)
_tools_decoder = msgspec.json.Decoder(list[_Tool])


def opening_name(envelope: Envelope) -> str:
    """Return 32 hex digits that name the conversation; those of nothing if the request has no opening."""
    chain = xxhash.xxh3_128()
    for part in _opening_parts(envelope):
        encoded = part.encode("utf-8", "surrogatepass")
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        chain.update(len(encoded).to_bytes(8, "big"))
        chain.update(encoded)
    return chain.hexdigest()


def _opening_parts(envelope: Envelope) -> Iterator[str]:
    yield envelope.model or ""
    yield from _texts(decoded(envelope.system))
    yield from _texts(decoded(envelope.instructions))
    yield from _tool_names(envelope.tools)
    yield from _until_first_user_message(envelope.messages)
    yield from _until_first_user_message(envelope.input)
    yield from (text[:_PROMPT_OPENING_CHARS] for text in _first(_texts(decoded(envelope.prompt))))


def _tool_names(tools: msgspec.Raw) -> list[str]:
    try:
        return [tool.name or tool.function.name for tool in _tools_decoder.decode(tools)]
    except NOT_JSON:
        return []


def _until_first_user_message(messages: msgspec.Raw) -> Iterator[str]:
    """Yield the texts of all messages up to the first user message, which is decoded last."""
    try:
        raw_messages = _list_decoder.decode(messages)
    except NOT_JSON:
        yield from (text[:_PROMPT_OPENING_CHARS] for text in _texts(decoded(messages)))
        return
    for raw in raw_messages:
        try:
            message = _message_decoder.decode(raw)
        except NOT_JSON:
            return
        yield message.role
        yield from _texts(decoded(message.content))
        if message.role == "user":
            return


def _texts(content: Any) -> Iterator[str]:
    """Yield the text of a string, of a list of strings, or of a list of text blocks."""
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        text = block.get("text") if isinstance(block, dict) else block
        # Whether or not the request keeps its billing line: it would give each session another name.
        if isinstance(text, str) and ((said := without_billing_line(text)) or not text):
            yield said


def _first(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        return
