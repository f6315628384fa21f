"""The ASGI callable in front of everything: proxied endpoints directly, all else through FastAPI."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from coda_router.auth.keys import ApiKey, ApiKeys, KeyAccount
from coda_router.conversations import Conversations
from coda_router.dispatch import RoutedRequest
from coda_router.edge.answers import send_json, send_refusal
from coda_router.edge.body import ClientGoneError, read_body
from coda_router.edge.client import CLIENT_EXTENSION, Client
from coda_router.edge.headers import forwarded_headers
from coda_router.edge.keepalive import KeepAlives, KeptAliveReply
from coda_router.edge.models import ModelCatalog
from coda_router.edge.protocols import ENDPOINTS, STORED_RESPONSE_PREFIX, Dialect, Endpoint, about_response
from coda_router.edge.reply import Reply
from coda_router.envelope import asks_for_stream, offers_tools, read_envelope, without_engine_controls
from coda_router.errors import Refusal, WorkerLostError
from coda_router.hygiene.cleaning import PrefixHygiene
from coda_router.metrics import RouterMetrics
from coda_router.relay import OutgoingRequest, Relay, RelayEvent

CLIENT_LEFT_STATUS = 499
"""Status under which requests are counted whose client left first."""

_INTERNAL_ERROR = Refusal(500, "internal_error", "the router failed; its log has the details", close=True)

_log = logging.getLogger("coda.router.edge")


class Gateway:
    """Serves one router's port.

    Args:
        relay: Carries requests to workers.
        conversations: Finds each request's session, and the stored response that it is about.
        catalog: Answers ``/v1/models``.
        keys: The API keys in force.
        hygiene: Returns the rules of prefix hygiene in force.
        metrics: Counts.
        max_body_bytes: Largest request body taken.
        keep_alive_s: Silence after which a stream says that it lives, seconds; 0 = never.
        admin: Everything that is not proxied (health, metrics, administration).
    """

    def __init__(
        self,
        *,
        relay: Relay,
        conversations: Conversations,
        catalog: ModelCatalog,
        keys: ApiKeys,
        hygiene: Callable[[], PrefixHygiene],
        metrics: RouterMetrics,
        max_body_bytes: int,
        keep_alive_s: float,
        admin: ASGIApp,
    ) -> None:
        self._relay = relay
        self._conversations = conversations
        self._catalog = catalog
        self._keys = keys
        self._hygiene = hygiene
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._keep_alives = KeepAlives(keep_alive_s)
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        endpoint = ENDPOINTS.get(path)
        if endpoint is not None:
            await self._proxy(endpoint, scope, receive, send)
        elif path.startswith(STORED_RESPONSE_PREFIX) and (about := about_response(path)) is not None:
            await self._proxy(about[0], scope, receive, send, response_id=about[1])
        elif path.startswith("/v1/"):
            await self._answer(scope, send)
        else:
            await self._admin(scope, receive, send)

    async def _proxy(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, response_id: str | None = None
    ) -> None:
        client: Client = scope["extensions"][CLIENT_EXTENSION]
        received_at_s = asyncio.get_running_loop().time()
        reply = Reply(send, client, endpoint.dialect, self._metrics, received_at_s, receive)
        task = asyncio.current_task()
        account: KeyAccount | None = None
        try:
            headers = dict(scope["headers"])
            account = self._admit(endpoint, scope["method"], headers, received_at_s)
            if response_id is None:
                request = await self._read(endpoint, scope, receive, client, headers, account.key, received_at_s)
            else:
                await read_body(receive, client, headers, self._max_body_bytes)
                request = self._ask_about(endpoint, response_id, scope, account.key, received_at_s)
            client.watch(task.cancel if task is not None else None)
            if request.is_stream and endpoint.events is not None:
                reply = KeptAliveReply(
                    send, client, endpoint.dialect, self._metrics, received_at_s, self._keep_alives,
                    form=endpoint.events, model=request.routed.model or "",
                )  # fmt: skip
            await self._relay.carry(request, reply.start, reply.body)
        except Refusal as refusal:
            client.watch(None)
            self._metrics.refused(refusal.code)
            await reply.refuse(refusal)
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
                await reply.refuse(_INTERNAL_ERROR)
        finally:
            client.watch(None)
            reply.close()
            if account is not None:
                account.end()
            self._metrics.answered(endpoint.path, reply.status)

    def _admit(
        self, endpoint: Endpoint, method: str, headers: Mapping[bytes, bytes], received_at_s: float
    ) -> KeyAccount:
        """Return the account on which the request is under way from now on; nothing of its body is read yet."""
        if method != endpoint.method:
            reason = f"{endpoint.path} takes {endpoint.method}, not {method}"
            raise Refusal(405, "method_not_allowed", reason, allow=endpoint.method)
        return self._keys.admit(headers, received_at_s)

    async def _read(
        self,
        endpoint: Endpoint,
        scope: Scope,
        receive: Receive,
        client: Client,
        headers: Mapping[bytes, bytes],
        key: ApiKey,
        received_at_s: float,
    ) -> OutgoingRequest:
        body = await read_body(receive, client, headers, self._max_body_bytes)
        envelope = read_envelope(body)
        self._catalog.check_visible(envelope.model, key.models)
        conversation = self._conversations.find(
            key.tenant, headers, envelope, len(body),
            makes_kv=endpoint.makes_kv, may_continue=endpoint.stores_responses,
        )  # fmt: skip
        learn = self._conversations.learner(key.tenant, conversation, envelope) if endpoint.stores_responses else None
        query = scope["query_string"]
        cleaned = self._hygiene().clean(body, envelope, hoists_system=endpoint.dialect is Dialect.ANTHROPIC)
        self._metrics.cleaned(cleaned.applied)
        body = without_engine_controls(cleaned.body, envelope)
        return OutgoingRequest(
            routed=RoutedRequest(
                model=envelope.model,
                tenant=key.tenant,
                session=conversation.session,
                table_key=conversation.table_key,
                body_bytes=len(body),
                ready_at_s=received_at_s,
                makes_kv=endpoint.makes_kv,
                visible_models=key.models,
                has_tools=offers_tools(envelope),
                stored_response=conversation.stored_response,
            ),
            request_line_start=b"POST " + endpoint.path.encode("ascii") + (b"?" + query if query else b""),
            header_lines=forwarded_headers(scope["headers"], is_open=self._keys.is_open),
            body=body,
            is_stream=endpoint.events is not None and asks_for_stream(envelope),
            learn=learn,
        )

    def _ask_about(
        self, endpoint: Endpoint, response_id: str, scope: Scope, key: ApiKey, received_at_s: float
    ) -> OutgoingRequest:
        """Return the request for a stored response, or for its end; what a client sends along says nothing."""
        conversation = self._conversations.of_response(key.tenant, response_id)
        target = endpoint.path.replace("{id}", response_id).encode("ascii")
        query = scope["query_string"]
        return OutgoingRequest(
            routed=RoutedRequest(
                model=None,
                tenant=key.tenant,
                session=conversation.session,
                table_key=conversation.table_key,
                body_bytes=0,
                ready_at_s=received_at_s,
                makes_kv=False,
                visible_models=key.models,
                stored_response=conversation.stored_response,
            ),
            request_line_start=endpoint.method.encode("ascii") + b" " + target + (b"?" + query if query else b""),
            header_lines=forwarded_headers(scope["headers"], is_open=self._keys.is_open),
            body=b"",
            is_stream=endpoint.events is not None and b"stream=true" in query.lower(),
        )

    async def _answer(self, scope: Scope, send: Send) -> None:
        """Answer what the router knows itself: the models, and that an endpoint does not exist."""
        path = scope["path"]
        try:
            account = self._keys.account_of(dict(scope["headers"]))
            body = self._catalog.answer(path, scope["method"], account.key.models)
            await send_json(send, 200, body)
            self._metrics.answered("/v1/models", 200)
        except Refusal as refusal:
            await send_refusal(send, refusal, Dialect.OPENAI)
            self._metrics.refused(refusal.code)
            self._metrics.answered("/v1/models" if path.startswith("/v1/models") else "other", refusal.status)
