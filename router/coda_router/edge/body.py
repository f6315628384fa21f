"""Reading a request's body whole, within bounds of size and time."""

import asyncio
from collections.abc import Mapping

from starlette.types import Receive

from coda_router.errors import Refusal

BODY_TIMEOUT_S = 120.0
"""Longest time that a client may take to send a body that does not come with the headers."""


class ClientGoneError(Exception):
    """The client closed its connection before its request was complete."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit_bytes: int) -> bytes:
    """Return the request's body.

    Raises:
        Refusal: 413 beyond ``limit_bytes``, 408 when the client is too slow.
        ClientGoneError: The client is gone.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    chunk, more = await _receive(receive)
    if len(chunk) > limit_bytes:
        raise _too_large(limit_bytes)
    if not more:
        return chunk
    body = bytearray(chunk)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while more:
                chunk, more = await _receive(receive)
                body += chunk
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    except TimeoutError as error:
        raise Refusal(
            408, "request_timeout", f"the request body did not arrive in {BODY_TIMEOUT_S:g} s", close=True
        ) from error
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
