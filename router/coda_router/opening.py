"""Names a conversation by its opening, for clients that send no session at all.

A conversation's later requests repeat its system prompt, tools and first user message, so these name it.
Clients re-serialise them between turns (blocks become strings, cache marks move), so text is hashed, not JSON.
Two conversations with the same opening share a name: a soft preference, which load overrules.
"""

from collections.abc import Iterable, Iterator

import msgspec
import xxhash

from coda_router.envelope import NOT_JSON, Envelope
from coda_router.hygiene.billing import without_billing_line
from coda_router.hygiene.system_text import read_message, read_text

# A name takes a bounded beginning of everything: a hostile request could otherwise hold up a router.
_MAX_ITEMS = 64  # of a list of messages, blocks or tools
_MAX_FIELD_BYTES = 8 * 1024 * 1024  # of a field's messages or blocks (a picture or two): what is longer is not decoded
_MAX_TEXT_CHARS = 32 * 1024
_MAX_OPENING_CHARS = 256 * 1024
_PROMPT_OPENING_CHARS = 1_024
# Long enough that what a billing line takes away is not missed: a character is 12 bytes of JSON at most.
_TEXT_WINDOW_BYTES = 12 * (_MAX_TEXT_CHARS + 1_024)
_LONGEST_ESCAPE_BYTES = 12

_UNSET = msgspec.Raw(b"")


class _Block(msgspec.Struct, frozen=True):
    text: msgspec.Raw = _UNSET


class _Function(msgspec.Struct, frozen=True):
    name: str = ""


class _Tool(msgspec.Struct, frozen=True):
    name: str = ""
    function: _Function = _Function()


# A struct that is read from a list takes its first items as fields and skips the others, without an object for each.
_FirstItems = msgspec.defstruct(
    "_FirstItems", [(f"item_{n}", msgspec.Raw, _UNSET) for n in range(_MAX_ITEMS)], array_like=True
)
_FirstTools = msgspec.defstruct(
    "_FirstTools", [(f"tool_{n}", _Tool | None, None) for n in range(_MAX_ITEMS)], array_like=True
)
_first_items_decoder = msgspec.json.Decoder(_FirstItems)
_first_tools_decoder = msgspec.json.Decoder(_FirstTools)
_block_decoder = msgspec.json.Decoder(_Block)


def opening_name(envelope: Envelope) -> str:
    """Return 32 hex digits that name the conversation; those of nothing if the request has no opening."""
    chain = xxhash.xxh3_128()
    chars = 0
    for part in _opening_parts(envelope):
        encoded = part.encode("utf-8", "surrogatepass")
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        chain.update(len(encoded).to_bytes(8, "big"))
        chain.update(encoded)
        chars += len(part)
        if chars > _MAX_OPENING_CHARS:
            break
    return chain.hexdigest()


def _opening_parts(envelope: Envelope) -> Iterator[str]:
    yield envelope.model or ""
    yield from _texts(envelope.system)
    yield from _texts(envelope.instructions)
    yield from _tool_names(envelope.tools)
    yield from _until_first_user_message(envelope.messages)
    yield from _until_first_user_message(envelope.input)
    yield from _prompt_opening(envelope.prompt)


def _tool_names(tools: msgspec.Raw) -> list[str]:
    """Return the names of the first tools."""
    try:
        first = msgspec.structs.astuple(_first_tools_decoder.decode(tools))
    except NOT_JSON:
        return []
    return [tool.name or tool.function.name for tool in first if tool is not None]


def _until_first_user_message(messages: msgspec.Raw) -> Iterator[str]:
    """Yield the texts of the first messages up to the first user message, which is decoded last."""
    if not _starts_with(messages, b"["):
        yield from (text[:_PROMPT_OPENING_CHARS] for text in _texts(messages))
        return
    bytes_left = _MAX_FIELD_BYTES
    for raw in _first_items(messages):
        bytes_left -= len(raw)
        if bytes_left < 0:
            yield _undecoded(raw)
            return
        message = read_message(raw)
        if message is None:
            return
        yield message.role
        yield from _texts(message.content)
        if message.role == "user":
            return


def _prompt_opening(prompt: msgspec.Raw) -> Iterator[str]:
    """Yield the beginning of a prompt, or of a list's first one; of token ids, that of their digits."""
    if _starts_with(prompt, b"[") and not _undecoded(prompt)[1:].lstrip().startswith('"'):
        yield _undecoded(prompt)
    else:
        yield from (text[:_PROMPT_OPENING_CHARS] for text in _first(_texts(prompt)))


def _texts(content: msgspec.Raw) -> Iterator[str]:
    """Yield the text of a string, of a list of strings, or of a list of text blocks; of each its beginning."""
    if len(content) > _MAX_FIELD_BYTES and not _starts_with(content, b'"'):
        yield _undecoded(content)
        return
    for block in _first_items(content) if _starts_with(content, b"[") else (content,):
        text = _text_of(block)
        # Whether or not the request keeps its billing line: it would give each session another name.
        if text is not None and ((said := without_billing_line(text)) or not text):
            yield said[:_MAX_TEXT_CHARS]


def _text_of(block: msgspec.Raw) -> str | None:
    if not _starts_with(block, b"{"):
        return _string(block)
    try:
        return _string(_block_decoder.decode(block).text)
    except NOT_JSON:
        return None


def _string(raw: msgspec.Raw) -> str | None:
    """Return the string in ``raw`` (of a very long one its beginning), None if it is none."""
    if not _starts_with(raw, b'"'):
        return None
    if len(raw) <= _TEXT_WINDOW_BYTES:
        return read_text(raw)
    for cut_bytes in range(_LONGEST_ESCAPE_BYTES):
        # The window may end within a character.
        window = bytes(memoryview(raw)[: _TEXT_WINDOW_BYTES - cut_bytes])
        if (text := read_text(window + b'"')) is not None:
            return text
    return None


def _first_items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the first 64 items of a JSON list; none of anything else."""
    try:
        items = msgspec.structs.astuple(_first_items_decoder.decode(raw))
    except NOT_JSON:
        return []
    return [item for item in items if len(item)]


def _starts_with(raw: msgspec.Raw, start: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == start


def _undecoded(raw: msgspec.Raw) -> str:
    """Return the beginning of some JSON as it is spelled."""
    return bytes(memoryview(raw)[:_PROMPT_OPENING_CHARS]).decode("latin-1")


def _first(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        return
