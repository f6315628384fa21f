"""Answers that the router gives itself."""

import msgspec
from starlette.types import Send

from coda_router.edge.protocols import Dialect, error_body
from coda_router.errors import Refusal

_JSON = (b"content-type", b"application/json")


async def send_json(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send one JSON document."""
    all_headers = [_JSON, (b"content-length", str(len(body)).encode("ascii")), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_refusal(send: Send, refusal: Refusal, dialect: Dialect) -> None:
    """Send an error in the client's dialect."""
    headers = []
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode("ascii")))
    if refusal.close:
        headers.append((b"connection", b"close"))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(send, refusal.status, error_body(refusal, dialect), headers)


def encoded(document: object) -> bytes:
    """Return a document of plain values as JSON."""
    return msgspec.json.encode(document)
