"""Changes the texts of a request's leading system prompt and leaves the bytes of everything else."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from coda_router.envelope import NOT_JSON, joined_object

MAX_CONTENT_BYTES = 512 * 1024
"""Longest content that is looked into: a rule must not hold up a router for a hostile request."""

MAX_LEADING_MESSAGES = 16
"""Most system messages before all others that are looked into."""

MAX_COMMAS = 256 * 1024
"""Most commas in the messages that are looked into: each may end an item, and a hostile list could have millions."""

_SYSTEM_ROLES = frozenset({"system", "developer"})
_EMPTY_TEXT = b'""'


class Message(msgspec.Struct, frozen=True):
    """A message's outer shape; ``content`` is undecoded JSON, empty where absent."""

    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"")


_message_decoder = msgspec.json.Decoder(Message)
_text_decoder = msgspec.json.Decoder(str)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_message(raw: bytes) -> Message | None:
    """Return the message in ``raw``, None if it is no message."""
    try:
        return _message_decoder.decode(raw)
    except NOT_JSON:
        return None


def read_text(raw: bytes) -> str | None:
    """Return the string in ``raw``, None if it is none."""
    try:
        return _text_decoder.decode(raw)
    except NOT_JSON:
        return None


def may_be_listed(raw: bytes) -> bool:
    """Return whether ``raw`` starts a JSON list of whose messages, blocks and fields there cannot be too many."""
    return raw.startswith(b"[") and raw.count(b",") <= MAX_COMMAS


def items_of(raw: bytes) -> list[bytes]:
    """Return the undecoded items of a JSON list. Raises one of ``NOT_JSON`` for anything else."""
    return [bytes(item) for item in _list_decoder.decode(raw)]


def fields_of(raw: bytes) -> dict[str, bytes]:
    """Return the undecoded fields of a JSON object. Raises one of ``NOT_JSON`` for anything else."""
    return {name: bytes(value) for name, value in _object_decoder.decode(raw).items()}


def joined_list(items: list[bytes]) -> bytes:
    """Return items as a JSON list."""
    pieces: list[bytes] = []
    for item in items:
        pieces += (b",", item)
    return b"".join([b"[", *pieces[1:], b"]"])


def with_field(raw: bytes, name: str, value: bytes) -> bytes:
    """Return a JSON object with one field's value replaced, or added at its end."""
    return joined_object(fields_of(raw) | {name: value})


@dataclass(frozen=True, slots=True)
class TextRule:
    """A change of system texts.

    Attributes:
        needle: Bytes that stand in every JSON string that the rule changes.
        window_bytes: How far into a request's messages the needle is looked for.
        change: Returns the changed text, or the same one.
    """

    needle: bytes
    window_bytes: int
    change: Callable[[str], str]

    def in_content(self, raw: bytes) -> bytes:
        """Return a content (a string or a list of blocks, as JSON) with its texts changed.

        A block of which nothing remains is left out. Raises one of ``NOT_JSON`` for broken JSON.
        """
        if len(raw) > MAX_CONTENT_BYTES or self.needle not in raw:
            return raw
        if raw.startswith(b'"'):
            return self._in_string(raw)
        if not raw.startswith(b"["):
            return raw
        blocks = items_of(raw)
        changed = [self._in_block(block) for block in blocks]
        return raw if changed == blocks else joined_list([block for block in changed if block is not None])

    def in_leading_messages(self, raw: bytes) -> bytes:
        """Return a list of messages (as JSON) in which the system messages before all others are changed.

        A list with more than 262,144 commas stays as it is. Raises one of ``NOT_JSON`` for broken JSON.
        """
        if not may_be_listed(raw):
            return raw
        parts = items_of(raw)
        is_changed = False
        for index, part in enumerate(parts[:MAX_LEADING_MESSAGES]):
            message = read_message(part)
            if message is None or message.role not in _SYSTEM_ROLES:
                break
            content = bytes(message.content)
            changed = self.in_content(content)
            if changed != content:
                parts[index] = with_field(part, "content", changed)
                is_changed = True
        return joined_list(parts) if is_changed else raw

    def _in_string(self, raw: bytes) -> bytes:
        text = read_text(raw)
        if text is None or (changed := self.change(text)) == text:
            return raw
        return msgspec.json.encode(changed)

    def _in_block(self, block: bytes) -> bytes | None:
        if self.needle not in block:
            return block
        if block.startswith(b'"'):
            changed = self._in_string(block)
            return None if changed == _EMPTY_TEXT else changed
        if not block.startswith(b"{"):
            return block
        text = fields_of(block).get("text", b"")
        changed = self._in_string(text) if text.startswith(b'"') else text
        if changed == text:
            return block
        return None if changed == _EMPTY_TEXT else with_field(block, "text", changed)
