"""Which worker is a session's home, where several have some of it."""

from collections.abc import Mapping

import xxhash

LIKE_TOKENS = 4_096
"""Tokens by which two prefixes of a session may differ and still count as alike; see :func:`home_of`."""

LIKE_SHARE = 0.25
"""Share of the longer prefix by which the other may at most be shorter."""


def home_of(resident_tokens: Mapping[str, int], recent_worker: str | None, session_hash: int) -> str | None:
    """Return the worker with the largest resident prefix; the recent one where nobody has any.

    Prefixes that differ by about a turn count as alike, and of those the session's hash chooses. Engines' tables
    are up to two seconds old: a session that returns faster, to another router, may be placed away from home.
    From then on, two engines have nearly all of it, and routers that always went for the longest prefix they
    have heard of would send it to and fro, each time to the engine that lacks a turn. By the hash they agree.

    Args:
        resident_tokens: Worker name to tokens of the session's prefix known to be resident there.
        recent_worker: Where this router placed the session's last request; None = it did not.
        session_hash: Hash of the session, the same in every router, 64 bits.
    """
    longest_tokens = max(resident_tokens.values(), default=0)
    if longest_tokens <= 0:
        return recent_worker
    enough_tokens = longest_tokens - min(LIKE_TOKENS, LIKE_SHARE * longest_tokens)
    alike = [name for name, tokens in resident_tokens.items() if tokens >= enough_tokens]
    if len(alike) == 1:
        return alike[0]
    if recent_worker in alike and all(resident_tokens[name] == longest_tokens for name in alike):
        return recent_worker
    return max(alike, key=lambda name: xxhash.xxh3_64_intdigest(name.encode(), session_hash))
