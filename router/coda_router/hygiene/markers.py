"""The count-down of tokens that Claude Code appends to a conversation, a new one after each turn.

It is a message of its own, of role ``system``. That leaves the prefix alone where it is rendered in its place. But
where a chat template takes system messages at the beginning only, engines put all of them there, and some gateways do
so always: then each new marker changes the prompt's beginning, and everything after it is computed again.
"""

import re

MARKER_END = " tokens left</total_tokens>"
"""What a marker ends with; the bytes that are looked for in a body."""

_OPENING_TAG = "<total_tokens>"
_MAX_DIGITS = 20
_MAX_MARKER_CHARS = len(_OPENING_TAG) + _MAX_DIGITS + len(MARKER_END)
_MARKER = re.compile(rf"{_OPENING_TAG}\d{{1,{_MAX_DIGITS}}}{MARKER_END}")


def as_marker(text: str) -> str | None:
    """Return the marker if ``text`` is one and nothing else, else None."""
    marker = text.strip()
    return marker if _MARKER.fullmatch(marker) else None


def without_trailing_markers(text: str) -> str:
    """Return ``text`` without the markers at its end and the white space before them."""
    kept_chars = len(text)
    while True:
        end = _end_without_space(text, kept_chars)
        start = text.rfind(_OPENING_TAG, max(0, end - _MAX_MARKER_CHARS), end)
        if start < 0 or not _MARKER.fullmatch(text, start, end):
            return text[:kept_chars]
        kept_chars = _end_without_space(text, start)


def _end_without_space(text: str, end: int) -> int:
    # By index: copies of a long text, one for each marker, would make a hostile body expensive.
    while end > 0 and text[end - 1].isspace():
        end -= 1
    return end
