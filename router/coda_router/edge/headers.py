"""Which headers pass the router, in either direction."""

from collections.abc import Iterable

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
        b"te", b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip

_REPLACED = frozenset({b"host", b"content-length", b"expect"})

# What a client must not tell an engine: the router writes the first two itself.
_ENGINE_CONTROLS = frozenset({b"x-session-id", b"x-vllm-priority", b"x-data-parallel-rank", b"x-data-parallel-host"})

_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"cookie"})

_DROPPED_FROM_REQUESTS = _HOP_BY_HOP | _REPLACED | _ENGINE_CONTROLS
_DROPPED_FROM_REPLIES = _HOP_BY_HOP


def forwarded_headers(headers: Iterable[tuple[bytes, bytes]], *, with_credentials: bool) -> bytes:
    """Return the header lines of a client's request that go on to an engine.

    Args:
        headers: Lower-case names and values.
        with_credentials: Whether the client's own credentials are the engine's business (an open router).
    """
    nominated = frozenset[bytes]()
    lines = []
    for name, value in headers:
        if name == b"connection":
            nominated |= {token.strip().lower() for token in value.split(b",")}
        if name in _DROPPED_FROM_REQUESTS or name.startswith(b"x-coda-"):
            continue
        if not with_credentials and name in _CREDENTIALS:
            continue
        lines.append((name, value))
    return b"".join(b"%b: %b\r\n" % (name, value) for name, value in lines if name not in nominated)


def reply_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an engine's reply that go back to the client."""
    return [(name, value) for name, value in headers if name not in _DROPPED_FROM_REPLIES]
