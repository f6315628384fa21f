"""How much one API key may ask for: requests a minute and requests at once. Pure: the clock is an argument."""

import math
from dataclasses import dataclass
from enum import StrEnum

MINUTE_S = 60.0
"""The period of a key's rate; also what a rested key may send at once, as time at its rate."""

CONCURRENCY_RETRY_AFTER_S = 2
"""Retry-After where a key has too many requests under way: when one of them ends, nobody knows."""

_ROUNDING_S = 1e-6


class Limit(StrEnum):
    """A limit of a key, under the name that its document has for it."""

    NONE = "none"
    CONCURRENT_REQUESTS = "maxConcurrentRequests"
    REQUESTS_PER_MINUTE = "requestsPerMinute"


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """Whether one more request may begin.

    Attributes:
        limit: Which limit stands against it; ``Limit.NONE`` = it may begin.
        full_at_s: When the key's token bucket is full again after this decision, seconds.
        retry_after_s: Seconds after which to try again; 0 where it may begin.
    """

    limit: Limit
    full_at_s: float
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None = no limit.

    The rate is a token bucket that holds one minute's requests: a key that rested for a minute may send all of them
    at once (clients that are refused for their rate often give up, so the burst is generous), and is then held to
    the rate. The bucket is kept as the time at which it is full again; so a changed rate takes effect at once, and
    what was used up stays used up in proportion.

    Attributes:
        requests_per_minute: Requests that may begin in a minute, lastingly; >= 1.
        max_concurrent_requests: Requests that may be under way at once; >= 1.
    """

    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def decide(self, in_flight_requests: int, full_at_s: float, now_s: float) -> LimitDecision:
        """Return whether one more request may begin; a refused one uses nothing up.

        Args:
            in_flight_requests: The key's requests that are under way.
            full_at_s: When its bucket is full again, seconds; any time in the past is a full one.
            now_s: The time, on the same clock.
        """
        if self.max_concurrent_requests is not None and in_flight_requests >= self.max_concurrent_requests:
            return LimitDecision(Limit.CONCURRENT_REQUESTS, full_at_s, CONCURRENCY_RETRY_AFTER_S)
        if self.requests_per_minute is None:
            return LimitDecision(Limit.NONE, full_at_s)
        full_after_s = max(full_at_s, now_s) + MINUTE_S / self.requests_per_minute
        too_early_s = full_after_s - now_s - MINUTE_S
        if too_early_s > _ROUNDING_S:
            return LimitDecision(Limit.REQUESTS_PER_MINUTE, full_at_s, math.ceil(too_early_s))
        return LimitDecision(Limit.NONE, full_after_s)


NO_LIMITS = KeyLimits()
"""Those of a key whose file states none."""
