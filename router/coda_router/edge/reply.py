"""The reply to one request on its way to the client."""

import asyncio

from starlette.types import Receive, Send

from coda_router.edge.answers import send_refusal
from coda_router.edge.client import Client
from coda_router.edge.headers import reply_headers
from coda_router.edge.protocols import Dialect
from coda_router.errors import Refusal
from coda_router.metrics import RouterMetrics
from coda_router.upstream.connection import ReplyHead


class Reply:
    """How far the reply to one request has come.

    Attributes:
        status: HTTP status under which the request is counted; 0 = nothing was sent.
        received_at_s: When the request was received, event loop's time in seconds.

    Args:
        send: ASGI's.
        client: The client's connection.
        dialect: Whose error shape the client understands.
        metrics: Counts.
        received_at_s: As the attribute.
        receive: ASGI's; None where the request's body was read already.
    """

    def __init__(
        self,
        send: Send,
        client: Client,
        dialect: Dialect,
        metrics: RouterMetrics,
        received_at_s: float,
        receive: Receive | None = None,
    ) -> None:
        self.status = 0
        self.received_at_s = received_at_s
        self._send = send
        self._client = client
        self._dialect = dialect
        self._metrics = metrics
        self._receive = receive

    async def start(self, head: ReplyHead) -> None:
        """Pass the head of an engine's reply on."""
        self.status = head.status
        self._observe_first_byte()
        headers = reply_headers(head.headers)
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def body(self, body: bytes, more: bool) -> None:
        """Pass a piece of an engine's reply on; waits for a slow client."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error of the router's own."""
        self.status = refusal.status
        is_unread = refusal.close and not self._client.has_whole_request
        await send_refusal(self._send, refusal, self._dialect, self._receive if is_unread else None)

    def close(self) -> None:
        """Leave nothing behind that would still say something; the request is over."""

    def _observe_first_byte(self) -> None:
        self._metrics.first_byte_s.observe(asyncio.get_running_loop().time() - self.received_at_s)
