"""The ASGI callable in front of everything: proxied endpoints directly, all else through FastAPI."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from coda_router.auth import ApiKeys
from coda_router.dispatch import RoutedRequest
from coda_router.edge.answers import send_json, send_refusal
from coda_router.edge.body import ClientGoneError, read_body
from coda_router.edge.client import CLIENT_EXTENSION, Client
from coda_router.edge.headers import forwarded_headers, reply_headers
from coda_router.edge.models import ModelCatalog
from coda_router.edge.protocols import ENDPOINTS, Dialect, Endpoint
from coda_router.envelope import read_envelope, without_engine_controls
from coda_router.errors import Refusal, WorkerLostError
from coda_router.identity import IdentityWriter, session_of
from coda_router.metrics import RouterMetrics
from coda_router.relay import OutgoingRequest, Relay, RelayEvent
from coda_router.upstream.connection import ReplyHead

CLIENT_LEFT_STATUS = 499
"""Status under which requests are counted whose client left first."""

_INTERNAL_ERROR = Refusal(500, "internal_error", "the router failed; its log has the details", close=True)

_log = logging.getLogger("coda.router.edge")


@dataclass(slots=True)
class _Reply:
    """How far the reply to one request has come; status 0 = nothing was sent."""

    send: Send
    received_at_s: float
    metrics: RouterMetrics
    status: int = 0

    async def start(self, head: ReplyHead) -> None:
        self.status = head.status
        self.metrics.first_byte_s.observe(asyncio.get_running_loop().time() - self.received_at_s)
        await self.send({"type": "http.response.start", "status": head.status, "headers": reply_headers(head.headers)})

    async def body(self, body: bytes, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})


class Gateway:
    """Serves one router's port.

    Args:
        relay: Carries requests to workers.
        identity: Knows sessions' keys in the engines' tables.
        catalog: Answers ``/v1/models``.
        keys: Returns the API keys in force.
        metrics: Counts.
        max_body_bytes: Largest request body taken.
        admin: Everything that is not proxied (health, metrics, administration).
    """

    def __init__(
        self,
        *,
        relay: Relay,
        identity: IdentityWriter,
        catalog: ModelCatalog,
        keys: Callable[[], ApiKeys],
        metrics: RouterMetrics,
        max_body_bytes: int,
        admin: ASGIApp,
    ) -> None:
        self._relay = relay
        self._identity = identity
        self._catalog = catalog
        self._keys = keys
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        endpoint = ENDPOINTS.get(path)
        if endpoint is not None:
            await self._proxy(endpoint, scope, receive, send)
        elif path.startswith("/v1/"):
            await self._answer(scope, send)
        else:
            await self._admin(scope, receive, send)

    async def _proxy(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        client: Client = scope["extensions"][CLIENT_EXTENSION]
        reply = _Reply(send, asyncio.get_running_loop().time(), self._metrics)
        task = asyncio.current_task()
        try:
            request = await self._read(endpoint, scope, receive, reply.received_at_s)
            client.watch(task.cancel if task is not None else None)
            await self._relay.carry(request, reply.start, reply.body)
        except Refusal as refusal:
            client.watch(None)
            reply.status = refusal.status
            self._metrics.refused(refusal.code)
            await send_refusal(send, refusal, endpoint.dialect)
        except WorkerLostError as error:
            _log.warning("%s: a reply was cut off: %s", endpoint.path, error)
            client.abort()
        except ClientGoneError:
            reply.status = CLIENT_LEFT_STATUS
        except asyncio.CancelledError:
            # Either the client left, or the router ends and its grace is over.
            self._metrics.relay_event(RelayEvent.CLIENT_LEFT if client.is_lost else RelayEvent.TRUNCATED)
            if client.is_lost:
                reply.status = CLIENT_LEFT_STATUS
            else:
                client.abort()
        except Exception:
            _log.exception("%s: a request failed inside the router", endpoint.path)
            if reply.status:
                client.abort()
            else:
                reply.status = 500
                await send_refusal(send, _INTERNAL_ERROR, endpoint.dialect)
        finally:
            client.watch(None)
            self._metrics.answered(endpoint.path, reply.status)

    async def _read(self, endpoint: Endpoint, scope: Scope, receive: Receive, received_at_s: float) -> OutgoingRequest:
        if scope["method"] != "POST":
            raise Refusal(405, "method_not_allowed", f"{endpoint.path} takes POST, not {scope['method']}")
        headers = dict(scope["headers"])
        keys = self._keys()
        tenant = keys.tenant_of(headers)
        body = await read_body(receive, headers, self._max_body_bytes)
        envelope = read_envelope(body)
        session = session_of(headers, envelope)
        query = scope["query_string"]
        body = without_engine_controls(body, envelope)
        return OutgoingRequest(
            routed=RoutedRequest(
                model=envelope.model,
                tenant=tenant,
                session=session,
                table_key=self._identity.table_key(tenant, session.name),
                body_bytes=len(body),
                ready_at_s=received_at_s,
                makes_kv=endpoint.makes_kv,
            ),
            request_line_start=b"POST " + endpoint.path.encode("ascii") + (b"?" + query if query else b""),
            header_lines=forwarded_headers(scope["headers"], with_credentials=keys.is_open),
            body=body,
        )

    async def _answer(self, scope: Scope, send: Send) -> None:
        """Answer what the router knows itself: the models, and that an endpoint does not exist."""
        path = scope["path"]
        try:
            self._keys().tenant_of(dict(scope["headers"]))
            body = self._catalog.answer(path, scope["method"])
            await send_json(send, 200, body)
            self._metrics.answered("/v1/models", 200)
        except Refusal as refusal:
            await send_refusal(send, refusal, Dialect.OPENAI)
            self._metrics.refused(refusal.code)
            self._metrics.answered("/v1/models" if path.startswith("/v1/models") else "other", refusal.status)
