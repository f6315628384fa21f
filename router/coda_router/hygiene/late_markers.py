"""Moves each marker that is a message of its own to the end of the text before it: the same words at the same place.

No message is made for it: one more, of whatever role, would not fit every chat template.
"""

from collections import defaultdict

import msgspec

from coda_router.envelope import joined_object
from coda_router.hygiene.markers import MARKER_END, as_marker
from coda_router.hygiene.system_text import fields_of, items_of, joined_list, may_be_listed, read_text

_NEEDLE = MARKER_END.encode("ascii")
_EMPTY_TEXT = b'""'
_MAX_MESSAGE_BYTES = 1_024  # of a message that holds a marker and nothing else: in a longer one none is looked for
_MAX_MESSAGES = 10_000  # of a conversation; each costs some microseconds, and a hostile one could hold up a router


def with_markers_moved(raw: bytes) -> bytes:
    """Return a list of messages (as JSON) without markers of their own, or ``raw`` itself if there is none to move.

    A marker goes to the last message before it that is no system message, if that is a user's; else it stays where it
    is. A list of more than 10,000 messages, or with more than 262,144 commas, stays as it is. Raises one of
    ``NOT_JSON`` for broken JSON.
    """
    if not may_be_listed(raw):
        return raw
    parts = items_of(raw)
    if len(parts) > _MAX_MESSAGES:
        return raw
    kept = _Kept()
    for part in parts:
        marker = _marker_in(part) if len(part) <= _MAX_MESSAGE_BYTES and _NEEDLE in part else None
        if marker is None or not kept.take(marker):
            kept.messages.append(part)
    return joined_list(kept.settled()) if kept.markers else raw


class _Kept:
    """The messages that stay, and the markers that each of them is to end with.

    No message is decoded twice, and none is copied once for each of its markers: a hostile request could otherwise
    make a long conversation expensive.
    """

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.markers: defaultdict[int, list[str]] = defaultdict(list)
        self._hosts: dict[int, dict[str, bytes]] = {}
        self._host: int | None = None
        self._searched = 0

    def take(self, marker: str) -> bool:
        """Return whether the marker found a message to go to."""
        for index in range(len(self.messages) - 1, self._searched - 1, -1):
            fields = fields_of(self.messages[index]) if self.messages[index].startswith(b"{") else {}
            role = read_text(fields.get("role", b""))
            if role == "system":
                continue
            is_host = role == "user" and fields.get("content", b"")[:1] in (b'"', b"[")
            self._host = index if is_host else None
            if is_host:
                self._hosts[index] = fields
            break
        self._searched = len(self.messages)
        if self._host is not None:
            self.markers[self._host].append(marker)
        return self._host is not None

    def settled(self) -> list[bytes]:
        """Return the messages with their markers."""
        for index, markers in self.markers.items():
            fields = self._hosts[index]
            content = _content_with(fields["content"], "\n".join(markers))
            self.messages[index] = joined_object(fields | {"content": content})
        return self.messages


def _marker_in(raw: bytes) -> str | None:
    """Return the marker if the message is a system message that says nothing else."""
    fields = fields_of(raw) if raw.startswith(b"{") else {}
    if read_text(fields.get("role", b"")) != "system":
        return None
    content = fields.get("content", b"")
    if content.startswith(b"["):
        blocks = items_of(content)
        content = fields_of(blocks[0]).get("text", b"") if len(blocks) == 1 and blocks[0].startswith(b"{") else b""
    text = read_text(content)
    return as_marker(text) if text is not None else None


def _content_with(content: bytes, text: str) -> bytes:
    """Return a user's content (a string or a list of blocks, as JSON) that ends with ``text``."""
    if content.startswith(b'"'):
        return _string_with(content, text)
    blocks = items_of(content)
    if blocks and (last := _block_with(blocks[-1], text)) is not None:
        blocks[-1] = last
    else:
        blocks.append(_text_block(text))
    return joined_list(blocks)


def _block_with(block: bytes, text: str) -> bytes | None:
    """Return a text or a tool's result that ends with ``text``; None for a block that holds no text."""
    fields = fields_of(block) if block.startswith(b"{") else {}
    match read_text(fields.get("type", b"")):
        case "text" if fields.get("text", b"").startswith(b'"'):
            return joined_object(fields | {"text": _string_with(fields["text"], text)})
        case "tool_result":
            result = fields.get("content", b"null")
            return joined_object(fields | {"content": _result_with(_EMPTY_TEXT if result == b"null" else result, text)})
    return None


def _result_with(content: bytes, text: str) -> bytes:
    """Return the content of a tool's result that ends with ``text``."""
    if content.startswith(b'"'):
        return _string_with(content, text)
    blocks = items_of(content)
    last = fields_of(blocks[-1]) if blocks and blocks[-1].startswith(b"{") else {}
    if last.get("text", b"").startswith(b'"'):
        blocks[-1] = joined_object(last | {"text": _string_with(last["text"], text)})
    else:
        blocks.append(_text_block(text))
    return joined_list(blocks)


def _string_with(raw: bytes, text: str) -> bytes:
    """Return a JSON string with ``text`` appended on a line of its own."""
    addition = msgspec.json.encode(text if raw == _EMPTY_TEXT else f"\n{text}")
    return b"".join((memoryview(raw)[:-1], memoryview(addition)[1:]))


def _text_block(text: str) -> bytes:
    return msgspec.json.encode({"type": "text", "text": text})
