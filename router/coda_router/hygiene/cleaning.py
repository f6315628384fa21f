"""Which rules of prefix hygiene are in force, and their application to one body."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from coda_router.envelope import NOT_JSON, Envelope, with_fields
from coda_router.hygiene.billing import BILLING_START, without_billing_line
from coda_router.hygiene.late_markers import with_markers_moved
from coda_router.hygiene.markers import MARKER_END, without_trailing_markers
from coda_router.hygiene.system_text import TextRule

# A billing line is the first thing in a prompt; markers are at the end of a system prompt, in whose text a gateway
# has put them.
_BILLING = TextRule(BILLING_START.encode("ascii"), 1_024, without_billing_line)
_TRAILING_MARKERS = TextRule(MARKER_END.encode("ascii"), 64 * 1_024, without_trailing_markers)


class HygieneRule(StrEnum):
    """Something that is recognised and kept out of the prefix."""

    BILLING_LINE = "BillingLine"
    ROLLING_MARKERS = "RollingMarkers"


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A body after prefix hygiene.

    Attributes:
        body: The very object that came in where no rule applied.
        applied: The rules that changed it.
    """

    body: bytes
    applied: tuple[HygieneRule, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixHygiene:
    """Rules for what stands at a prompt's beginning though no two requests share it.

    Attributes:
        billing_line: Take the billing line from the beginning of the system prompt.
        rolling_markers: Keep token count-downs out of the system prompt.
    """

    billing_line: bool = True
    rolling_markers: bool = True

    def clean(self, body: bytes, envelope: Envelope, *, hoists_system: bool) -> Cleaned:
        """Return ``body`` with the rules applied; one that cannot be read to the end stays as it is.

        Args:
            body: A JSON object.
            envelope: Its outer shape.
            hoists_system: Whether engines may put system messages at the prompt's beginning wherever they stand, as
                on Anthropic's protocol. Elsewhere a marker among the messages stays in its place.
        """
        request = _Request(body, envelope)
        applied = []
        try:
            if self.billing_line and request.change_system(_BILLING):
                applied.append(HygieneRule.BILLING_LINE)
            if self.rolling_markers and request.keep_markers_out(hoists_system=hoists_system):
                applied.append(HygieneRule.ROLLING_MARKERS)
            return Cleaned(with_fields(body, envelope, request.changed), tuple(applied)) if applied else Cleaned(body)
        except NOT_JSON:
            return Cleaned(body)


class _Request:
    """The fields of one request that rules look at, and what they made of them so far."""

    def __init__(self, body: bytes, envelope: Envelope) -> None:
        self._body = body
        self._envelope = envelope
        self.changed: dict[str, bytes] = {}

    def change_system(self, rule: TextRule) -> bool:
        """Change the leading system texts by ``rule``; return whether that changed anything."""
        outcomes = [self._replace("system", rule.in_content), self._replace("instructions", rule.in_content)]
        if rule.needle in bytes(memoryview(self._value("messages"))[: rule.window_bytes]):
            outcomes.append(self._replace("messages", rule.in_leading_messages))
        return any(outcomes)

    def keep_markers_out(self, *, hoists_system: bool) -> bool:
        """Keep markers out of the system prompt; return whether that changed anything."""
        if not hoists_system:
            return self.change_system(_TRAILING_MARKERS)
        if _TRAILING_MARKERS.needle not in self._body:
            return False
        is_moved = self._replace("messages", with_markers_moved)
        return self._replace("system", _TRAILING_MARKERS.in_content) or is_moved

    def _value(self, name: str) -> bytes | msgspec.Raw:
        value: bytes | msgspec.Raw = self.changed[name] if name in self.changed else getattr(self._envelope, name)
        return value

    def _replace(self, name: str, change: Callable[[bytes], bytes]) -> bool:
        value = bytes(self._value(name))
        changed = change(value)
        if changed == value:
            return False
        self.changed[name] = changed
        return True
