"""Requests to the API server, over one pool of connections, with the credentials that kopf found."""

import json
from collections.abc import Callable, Mapping
from typing import Self

import aiohttp
import kopf

from coda_operator.errors import ApiError
from coda_operator.kube.resources import EVENTS, Object, Ref, Resource, ref_of

FIELD_MANAGER = "coda-operator"
_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=10)
_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"

Login = Callable[[], kopf.ConnectionInfo]


def login() -> kopf.ConnectionInfo:
    """Return how to reach the API server: a pod's service account, else the kubeconfig.

    Raises:
        kopf.LoginError: There is neither.
    """
    settings = kopf.OperatorSettings()
    connection = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if connection is None:
        raise kopf.LoginError("no service account and no kubeconfig; run in a cluster or set KUBECONFIG")
    return connection


class KubeClient:
    """Reads and writes objects. Closes its connections at the end of ``async with``."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._connection = login()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._connection.as_ssl_context(), limit=32), timeout=_TIMEOUT
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return the object, or None if there is none.

        Raises:
            ApiError: The API server refused, or could not be reached (status 0).
        """
        try:
            return await self._request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    async def find(
        self, resource: Resource, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> list[Object]:
        """Return the objects of a namespace (None = of all) that have these labels.

        Raises:
            ApiError: As :meth:`get`.
        """
        selector = ",".join(f"{name}={value}" for name, value in (labels or {}).items())
        answer = await self._request("GET", resource.path(namespace), params={"labelSelector": selector})
        # Items of a list come without their kind.
        return [
            {"apiVersion": answer["apiVersion"], "kind": resource.kind, **item} for item in answer.get("items") or []
        ]

    async def apply(self, item: Object) -> Object:
        """Make the object so (server-side apply as this operator); fields of other managers stay.

        Raises:
            ApiError: As :meth:`get`; 400 or 422 for fields that the API server does not know or allow.
        """
        ref = ref_of(item)
        path = ref.resource.path(item["metadata"]["namespace"], ref.name)
        params = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self._request("PATCH", path, item, params=params, content_type=_APPLY_PATCH)

    async def create(self, item: Object) -> Object:
        """Create the object.

        Raises:
            ApiError: As :meth:`get`; ``is_conflict`` when it exists.
        """
        ref = ref_of(item)
        path = ref.resource.path(item["metadata"]["namespace"])
        return await self._request("POST", path, item, params={"fieldManager": FIELD_MANAGER})

    async def delete(self, ref: Ref, namespace: str, uid: str) -> None:
        """Delete the object with this uid and what it owns; nothing happens if it is gone or another one.

        Raises:
            ApiError: As :meth:`get`.
        """
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._request("DELETE", ref.resource.path(namespace, ref.name), options)
        except ApiError as error:
            if not (error.is_not_found or error.is_conflict):
                raise

    async def merge(self, ref: Ref, namespace: str, patch: Object, subresource: str | None = None) -> None:
        """Merge ``patch`` into the object or its subresource; nothing happens if it is gone.

        Raises:
            ApiError: As :meth:`get`.
        """
        try:
            path = ref.resource.path(namespace, ref.name, subresource)
            await self._request("PATCH", path, patch, content_type=_MERGE_PATCH)
        except ApiError as error:
            if not error.is_not_found:
                raise

    async def record(self, event: Object) -> None:
        """Create an Event.

        Raises:
            ApiError: As :meth:`get`.
        """
        await self._request("POST", EVENTS.path(event["metadata"]["namespace"]), event)

    async def _request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        status, answer = await self._send(method, path, body, params, content_type)
        if status == 401:
            # A pod's token is replaced about once an hour.
            self._connection = self._login()
            status, answer = await self._send(method, path, body, params, content_type)
        if status >= 400:
            reason = str(answer.get("reason", ""))
            raise ApiError(status, reason, str(answer.get("message") or f"{method} {path}: HTTP {status}"))
        return answer

    async def _send(
        self, method: str, path: str, body: Object | None, params: Mapping[str, str] | None, content_type: str
    ) -> tuple[int, Object]:
        if self._session is None:
            raise RuntimeError("use KubeClient in `async with`")
        url = self._connection.server.rstrip("/") + path
        headers = self._connection.as_http_headers() | {"Content-Type": content_type}
        data = json.dumps(body).encode() if body is not None else None
        try:
            async with self._session.request(method, url, params=params, data=data, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "Unreachable", f"{method} {path}: {type(error).__name__}: {error}") from error
        return response.status, _decode(answer)


def _decode(answer: bytes) -> Object:
    try:
        decoded = json.loads(answer or b"{}")
    except ValueError:
        return {"message": answer.decode(errors="replace")[:200]}
    return decoded if isinstance(decoded, dict) else {}
