"""Answers that the router gives itself."""

import msgspec
from starlette.types import Receive, Send

from coda_router.edge.body import drop_body
from coda_router.edge.protocols import Dialect, error_body
from coda_router.errors import Refusal

_JSON = (b"content-type", b"application/json")


async def send_json(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    unread: Receive | None = None,
) -> None:
    """Send one JSON document.

    Args:
        send: ASGI's.
        status: HTTP status.
        body: The document.
        headers: Further headers.
        unread: ASGI's ``receive`` where the request's body is still on its way; None = nothing of it is.
    """
    all_headers = [_JSON, (b"content-length", str(len(body)).encode("ascii")), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    if unread is not None:
        # If the connection closed while the client still sends, the kernel would reset it, and lose the answer.
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await drop_body(unread)
        body = b""
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_refusal(send: Send, refusal: Refusal, dialect: Dialect, unread: Receive | None = None) -> None:
    """Send an error in the client's dialect; ``unread`` as for :func:`send_json`."""
    headers = []
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode("ascii")))
    if refusal.close:
        headers.append((b"connection", b"close"))
    if refusal.allow is not None:
        headers.append((b"allow", refusal.allow.encode("ascii")))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(send, refusal.status, error_body(refusal, dialect), headers, unread)


def encoded(document: object) -> bytes:
    """Return a document of plain values as JSON."""
    return msgspec.json.encode(document)
