"""The API keys in force: from a request's headers to whose it is, what it may use, and whether it may begin."""

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from coda_router.auth.documents import sha256_of
from coda_router.auth.limits import NO_LIMITS, KeyLimits, Limit, LimitDecision
from coda_router.errors import Refusal


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key.

    Attributes:
        sha256: SHA-256 of the key, 32 bytes.
        tenant: Whose it is; ``""`` for everybody where no keys are configured.
        models: Names of the models that it may use; None = all.
        limits: How much it may ask for.
    """

    sha256: bytes = field(repr=False)
    tenant: str
    models: frozenset[str] | None = None
    limits: KeyLimits = NO_LIMITS


class KeyAccount:
    """A key in force and what it has used up.

    Attributes:
        key: The key as its file says now.
        in_flight_requests: Its requests that are under way; :meth:`ApiKeys.admit` opens one, :meth:`end` closes it.
        limited_requests: Its requests that a limit stood against.
    """

    __slots__ = ("_full_at_s", "in_flight_requests", "key", "limited_requests")

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.in_flight_requests = 0
        self.limited_requests = 0
        self._full_at_s = -math.inf

    def begin(self, now_s: float) -> LimitDecision:
        """Return whether one more request may begin, and count it as under way if so."""
        decision = self.key.limits.decide(self.in_flight_requests, self._full_at_s, now_s)
        if decision.limit is Limit.NONE:
            self.in_flight_requests += 1
            self._full_at_s = decision.full_at_s
        else:
            self.limited_requests += 1
        return decision

    def end(self) -> None:
        """Count a request as over."""
        self.in_flight_requests -= 1


class ApiKeys:
    """The keys in force, kept only as keyed hashes.

    The hash's key is random for each process: nobody outside can choose what a presented key hashes to, so the
    time that a look-up takes tells nothing about any API key, whether its file holds the key or a hash of it.

    Attributes:
        limited: Requests that a limit stood against, by limit.
    """

    def __init__(self) -> None:
        self._hash_key = secrets.token_bytes(32)
        self._accounts: dict[bytes, KeyAccount] = {}
        self._everybody = KeyAccount(ApiKey(b"", ""))
        self.limited: Counter[Limit] = Counter()

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return not self._accounts

    @property
    def accounts(self) -> Iterator[KeyAccount]:
        """The keys in force, in the order of their files."""
        return iter(self._accounts.values())

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Put other keys in force; one that was in force before goes on with what it has used up."""
        accounts: dict[bytes, KeyAccount] = {}
        for key in keys:
            digest = self._digest(key.sha256)
            account = accounts[digest] = self._accounts.get(digest) or KeyAccount(key)
            account.key = key
        self._accounts = accounts

    def account_of(self, headers: Mapping[bytes, bytes]) -> KeyAccount:
        """Return the account of the key that a request carries, as ``Authorization: Bearer`` or ``x-api-key``.

        Raises:
            Refusal: 401; no key, or an unknown one.
        """
        if not self._accounts:
            return self._everybody
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        presented = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not presented:
            raise Refusal(401, "missing_api_key", "no API key given; send Authorization: Bearer KEY")
        account = self._accounts.get(self._digest(sha256_of(presented)))
        if account is None:
            raise Refusal(401, "invalid_api_key", "the API key is not known here")
        return account

    def admit(self, headers: Mapping[bytes, bytes], now_s: float) -> KeyAccount:
        """Return the account of a request's key, with the request under way on it until :meth:`KeyAccount.end`.

        Raises:
            Refusal: 401 as :meth:`account_of`; 429 where a limit of the key stands against the request.
        """
        account = self.account_of(headers)
        decision = account.begin(now_s)
        if decision.limit is not Limit.NONE:
            self.limited[decision.limit] += 1
            raise _over(account.key.limits, decision)
        return account

    def _digest(self, sha256: bytes) -> bytes:
        return hashlib.blake2b(sha256, digest_size=32, key=self._hash_key).digest()


def _over(limits: KeyLimits, decision: LimitDecision) -> Refusal:
    if decision.limit is Limit.CONCURRENT_REQUESTS:
        allowed = f"have {limits.max_concurrent_requests} requests under way at once"
    else:
        allowed = f"begin {limits.requests_per_minute} requests a minute"
    return Refusal(
        429,
        "rate_limit_exceeded",
        f"this API key may {allowed} ({decision.limit.value}); try again in {decision.retry_after_s} s",
        retry_after_s=decision.retry_after_s,
    )
