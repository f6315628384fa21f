"""Reading a request's body whole, within bounds of size and time."""

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Receive

from coda_router.edge.client import Client
from coda_router.errors import Refusal

BODY_TIMEOUT_S = 120.0
"""Longest time that a client may take to send a body after the head, seconds."""

DROP_TIMEOUT_S = 2.0
"""Longest time for which a refused request's body is still read, seconds."""

MAX_DROPPED_BYTES = 64 * 1024 * 1024
"""Most bytes that are still read of a refused request's body."""


class ClientGoneError(Exception):
    """The client closed its connection before its request was complete."""


async def read_body(receive: Receive, client: Client, headers: Mapping[bytes, bytes], limit_bytes: int) -> bytes:
    """Return the request's body.

    Raises:
        Refusal: 413 beyond ``limit_bytes``, 408 when the client is too slow.
        ClientGoneError: The client is gone.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    if client.has_whole_request:
        return await _read_all(receive, limit_bytes)  # most requests, and they need no timer
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_all(receive, limit_bytes)
    except TimeoutError as error:
        raise Refusal(
            408, "request_timeout", f"the request body did not arrive in {BODY_TIMEOUT_S:g} s", close=True
        ) from error


async def drop_body(receive: Receive) -> None:
    """Read what the client still sends of a refused request's body, within bounds, and drop it."""
    dropped_bytes, more = 0, True
    with contextlib.suppress(TimeoutError, ClientGoneError):
        async with asyncio.timeout(DROP_TIMEOUT_S):
            while more and dropped_bytes < MAX_DROPPED_BYTES:
                chunk, more = await _receive(receive)
                dropped_bytes += len(chunk)


async def _read_all(receive: Receive, limit_bytes: int) -> bytes:
    chunk, more = await _receive(receive)
    if len(chunk) > limit_bytes:
        raise _too_large(limit_bytes)
    if not more:
        return chunk
    body = bytearray(chunk)
    while more:
        chunk, more = await _receive(receive)
        body += chunk
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(body)


async def _receive(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message["body"], message["more_body"]


def _too_large(limit_bytes: int) -> Refusal:
    return Refusal(
        413,
        "request_too_large",
        f"the request body is larger than {limit_bytes} bytes, the router's --max-body-bytes",
        close=True,  # the client may still be sending what nobody will read
    )
