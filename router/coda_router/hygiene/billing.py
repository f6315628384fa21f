"""The attribution line that Claude Code puts before its system prompt: another one in each session and sub-agent."""

import re

BILLING_START = "x-anthropic-billing-header:"
"""What the line starts with."""

# The line's own pairs and nothing after them: some gateways join it to the prompt without an end of line.
_PAIR = r"[ \t]*[A-Za-z_][\w.-]*=[^\s;]*(?:;|(?=[\r\n]|$))"
_LINES = re.compile(rf"(?:{re.escape(BILLING_START)}(?:{_PAIR})+[ \t]*[\r\n]*)+")


def without_billing_line(text: str) -> str:
    """Return ``text`` without the billing line that it starts with, or as it is if it starts with none."""
    if not text.startswith(BILLING_START):
        return text
    match = _LINES.match(text)
    return text[match.end() :] if match else text
