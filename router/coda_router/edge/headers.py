"""Which headers pass the router, in either direction."""

from collections.abc import Iterable

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
        b"te", b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip

_REPLACED = frozenset({b"host", b"content-length", b"expect"})

# What a client must not tell an engine, or ask of it: the router writes the first itself, and the last would have
# the engine's load told in the reply.
_ENGINE_CONTROLS = frozenset({b"x-session-id", b"endpoint-load-metrics-format"})
_ENGINE_CONTROL_PREFIXES = (b"x-coda-", b"x-vllm-", b"x-data-parallel-")

# Where tenants share engines, their credentials are not the engines' business, and neither may choose the id under
# which the engines log a request.
_TENANTS_OWN = frozenset({b"authorization", b"x-api-key", b"cookie", b"x-request-id"})

_DROPPED_FROM_REQUESTS = _HOP_BY_HOP | _REPLACED | _ENGINE_CONTROLS
_DROPPED_FROM_REPLIES = _HOP_BY_HOP


def forwarded_headers(headers: Iterable[tuple[bytes, bytes]], *, is_open: bool) -> bytes:
    """Return the header lines of a client's request that go on to an engine.

    Args:
        headers: Lower-case names and values.
        is_open: Whether the router asks for no API key: then credentials and request ids pass as they are.
    """
    nominated = frozenset[bytes]()
    lines = []
    for name, value in headers:
        if name == b"connection":
            nominated |= {token.strip().lower() for token in value.split(b",")}
        if name in _DROPPED_FROM_REQUESTS or name.startswith(_ENGINE_CONTROL_PREFIXES):
            continue
        if not is_open and name in _TENANTS_OWN:
            continue
        lines.append((name, value))
    return b"".join(b"%b: %b\r\n" % (name, value) for name, value in lines if name not in nominated)


def reply_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an engine's reply that go back to the client."""
    return [(name, value) for name, value in headers if name not in _DROPPED_FROM_REPLIES]
