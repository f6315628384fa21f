"""Which engine holds which response of ``/v1/responses``: vLLM stores them in one engine's memory.

The router learns a response's id from the first bytes of the reply that makes it. An id counts only for the
tenant whose reply it was: engines know no tenants, so nobody else's request about it may reach the engine.
"""

import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from coda_router.errors import Refusal

MAX_RESPONSES = 32_768
"""Most responses remembered, about 0.5 KiB each; the one made first is forgotten first."""

MAX_TENANT_SHARE = 0.25
"""Share of all places beyond which a tenant's new response takes the place of an own one, once all are taken."""

RESPONSE_TTL_S = 24 * 3600.0
"""Time for which a response is remembered, seconds."""

_ID_WITHIN_BYTES = 1024

# The reply as one document, or its first event. Only the first field of the response itself is taken for its id: what
# follows repeats the client's own words, such as the metadata.
_RESPONSE_ID = re.compile(
    rb"\s*(?:\{|(?::[^\n]*\n\s*)*(?:event:[^\n]*\n)?data:\s*\{"
    rb'(?:\s*"(?:type|sequence_number)"\s*:\s*(?:"[^"\\]*"|\d+)\s*,)*\s*"response"\s*:\s*\{)'
    rb'\s*"id"\s*:\s*"([\w.:-]{1,128})"'
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that an engine may hold.

    Attributes:
        id: As the engine named it.
        worker: Name of the worker that made it. Whether it still has it only the engine knows: it may have
            restarted, or store nothing at all, and says so itself.
        session: Name of the session that it belongs to, within its tenant.
    """

    id: str
    worker: str
    session: str


class ResponseMap:
    """Tenant and response id to :class:`StoredResponse`, bounded in number and age.

    When all places are taken, a tenant that holds more than its share of them gives up its own oldest response, so
    that it cannot push out what others stored; for any other the oldest of all goes. Every operation is O(1).

    Args:
        max_responses: Most responses remembered.
        ttl_s: Seconds after which one is forgotten.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, ttl_s: float = RESPONSE_TTL_S) -> None:
        self._max_responses = max_responses
        self._ttl_s = ttl_s
        self._responses: OrderedDict[tuple[str, str], tuple[str, str, float]] = OrderedDict()
        self._ids: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, tenant: str, response_id: str, now_s: float) -> StoredResponse | None:
        """Return where one of the tenant's responses is; None if it never made it, or too long ago."""
        known = self._responses.get((tenant, response_id))
        if known is None:
            return None
        worker, session, made_at_s = known
        if now_s - made_at_s > self._ttl_s:
            self._forget(tenant, response_id)
            return None
        return StoredResponse(response_id, worker, session)

    def put(self, tenant: str, response: StoredResponse, now_s: float) -> None:
        """Remember a response that was made now, and drop what is too old or too much."""
        key = (tenant, response.id)
        self._responses[key] = (response.worker, response.session, now_s)
        self._responses.move_to_end(key)
        own_ids = self._ids[tenant]
        own_ids[response.id] = None
        own_ids.move_to_end(response.id)
        if len(self._responses) > self._max_responses:
            if len(own_ids) > self._max_responses * MAX_TENANT_SHARE:
                self._forget(tenant, next(iter(own_ids)))
            else:
                self._forget(*next(iter(self._responses)))
        oldest, (_, _, made_at_s) = next(iter(self._responses.items()))
        if now_s - made_at_s > self._ttl_s:
            self._forget(*oldest)

    def _forget(self, tenant: str, response_id: str) -> None:
        del self._responses[tenant, response_id]
        del self._ids[tenant][response_id]
        if not self._ids[tenant]:
            del self._ids[tenant]


def response_id_of(reply: bytes) -> str | None:
    """Return the response's id, given the first bytes of a reply's body; None if they do not tell it.

    Understands a document and a stream of events. Reads no more than the first KiB.
    """
    found = _RESPONSE_ID.match(reply, 0, _ID_WITHIN_BYTES)
    return found[1].decode("ascii") if found else None


def previous_response_not_found(response_id: str) -> Refusal:
    """Return the refusal of a request that continues an unknown response, as OpenAI's API words it."""
    return Refusal(
        400,
        "previous_response_not_found",
        f"Previous response with id {response_id[:128]!r} not found. Send the conversation's whole input instead.",
        param="previous_response_id",
    )


def response_not_found(response_id: str) -> Refusal:
    """Return the refusal of a request for an unknown response."""
    return Refusal(404, "response_not_found", f"Response with id {response_id!r} not found.", param="response_id")
