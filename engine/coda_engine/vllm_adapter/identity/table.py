"""Who each live request is from: a bounded side table by request id."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from vllm.v1.request import Request

MAX_ENTRIES = 8_192


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What the engine keeps of a request's identity.

    Attributes:
        session_key: Hashed name of its session; "" when it belongs to none that a router could know.
        router_id: Router that sent it; "" = unknown.
        tier: Service tier.
        ready_age_ms: How long it had been logically ready when the engine got it, milliseconds.
    """

    session_key: str = ""
    router_id: str = ""
    tier: int = 0
    ready_age_ms: float = 0.0


UNKNOWN = RequestIdentity()


class IdentityTable:
    """Written by the input thread, read by the engine's thread; the oldest entries give way."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: OrderedDict[str, RequestIdentity] = OrderedDict()
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self.untrusted = 0

    def put(self, request_id: str, identity: RequestIdentity, *, trusted: bool) -> None:
        """Keep ``identity`` until :meth:`drop`, or until too many others came after it."""
        with self._lock:
            self._entries[request_id] = identity
            self.untrusted += not trusted
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def get(self, request_id: str) -> RequestIdentity:
        """Return what is known of the request; :data:`UNKNOWN` without an entry."""
        return self._entries.get(request_id, UNKNOWN)

    def ready_at_ms(self, request: Request) -> float:
        """Return when the request became logically ready, Unix milliseconds (its arrival here less its age then)."""
        arrived_at_ms: float = request.arrival_time * 1000.0
        return arrived_at_ms - self.get(request.request_id).ready_age_ms

    def drop(self, request_id: str) -> None:
        """Forget a request that is over."""
        with self._lock:
            self._entries.pop(request_id, None)
