"""Finds workers in Kubernetes: the EndpointSlices of one Service, by a plain list and watch.

The router needs two requests of the Kubernetes API, so it speaks them itself instead of carrying a client
library; the pod's service account must be allowed to list and watch ``endpointslices``.
"""

import asyncio
import json
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import aiohttp

from coda_router.errors import ConfigurationError
from coda_router.fleet.address import WorkerAddress

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token and its cluster's CA."""

WATCH_TIMEOUT_S = 240
"""Time after which a watch is opened anew; a broken connection goes unnoticed no longer than that."""

RETRY_INTERVAL_S = 2.0
"""Time between attempts while the API does not answer, or answers with nothing."""

_MAX_EVENT_BYTES = 4 * 1024 * 1024
_log = logging.getLogger("coda.router.discovery")


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """The Service whose endpoints are the workers, and how to reach the API.

    Attributes:
        namespace: The Service's namespace.
        name: The Service's name.
        api_url: Base URL of the Kubernetes API, without a trailing slash.
        credentials_dir: Folder with ``token`` (read for every request: it rotates) and ``ca.crt``.
    """

    namespace: str
    name: str
    api_url: str
    credentials_dir: Path = SERVICE_ACCOUNT_DIR

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> Self:
        """Return the Service in ``NAMESPACE/SERVICE``, reached as pods do.

        Raises:
            ConfigurationError: Not of that form, or the process does not run in a pod.
        """
        namespace, separator, name = text.partition("/")
        if not (namespace and separator and name) or "/" in name:
            raise ConfigurationError(f"--discover {text!r}: give NAMESPACE/SERVICE")
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigurationError(
                "--discover works in a Kubernetes pod only (KUBERNETES_SERVICE_HOST is not set); "
                "elsewhere give --workers URL..."
            )
        return cls(namespace, name, f"https://{f'[{host}]' if ':' in host else host}:{port}")


def workers_of(slices: Iterable[Mapping[str, Any]]) -> dict[str, WorkerAddress]:
    """Return the ready endpoints of some EndpointSlices, by worker name (the pod's, where one is named)."""
    workers: dict[str, WorkerAddress] = {}
    for endpoint_slice in slices:
        ports = [port["port"] for port in endpoint_slice.get("ports") or [] if port.get("port")]
        for endpoint in endpoint_slice.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            addresses = endpoint.get("addresses") or []
            is_going = conditions.get("ready") is False or conditions.get("terminating") is True
            if not ports or not addresses or is_going:
                continue
            host = addresses[0]
            name = (endpoint.get("targetRef") or {}).get("name") or f"{host}:{ports[0]}"
            workers[name] = WorkerAddress(name, host, ports[0])
    return workers


class EndpointWatcher:
    """Tells the ready endpoints of a Service whenever they change.

    While the API does not answer, the last known endpoints stay.

    Args:
        service: Whose endpoints.
        on_workers: Called with all workers, at first and after each change.
    """

    def __init__(self, service: KubernetesService, on_workers: Callable[[Iterable[WorkerAddress]], None]) -> None:
        self._service = service
        self._on_workers = on_workers
        self._slices: dict[str, Mapping[str, Any]] = {}
        self._url = f"{service.api_url}/apis/discovery.k8s.io/v1/namespaces/{service.namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service.name}"}

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            try:
                await self._follow()
            except Exception as error:  # whatever it was: without discovery the fleet would stay as it is for ever
                _log.warning("endpoints of %s cannot be read: %r", self._service.name, error)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _follow(self) -> None:
        """List and watch until the list has to be read anew."""
        connector = aiohttp.TCPConnector(ssl=self._ssl_context())
        async with aiohttp.ClientSession(connector=connector, read_bufsize=_MAX_EVENT_BYTES) as session:
            version = await self._list(session)
            while version:
                before, version = version, await self._watch(session, version)
                if version == before:
                    # It brought nothing: one that something in between ends at once must not be opened in a loop.
                    await asyncio.sleep(RETRY_INTERVAL_S)

    def _ssl_context(self) -> ssl.SSLContext | bool:
        ca_file = self._service.credentials_dir / "ca.crt"
        return ssl.create_default_context(cafile=str(ca_file)) if ca_file.exists() else True

    def _headers(self) -> dict[str, str]:
        token_file = self._service.credentials_dir / "token"
        return {"authorization": f"Bearer {token_file.read_text().strip()}"} if token_file.exists() else {}

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Read all slices; return the resource version to watch from."""
        timeout = aiohttp.ClientTimeout(total=30)
        async with session.get(self._url, params=self._selector, headers=self._headers(), timeout=timeout) as reply:
            if reply.status != HTTPStatus.OK:
                raise ValueError(f"the Kubernetes API answers {reply.status} to a list of endpointslices")
            document = await reply.json()
        self._slices = {item["metadata"]["name"]: item for item in document["items"]}
        self._tell()
        return str(document["metadata"]["resourceVersion"])

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> str:
        """Apply changes until the watch ends; return where to go on, ``""`` = list again."""
        params = self._selector | {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_TIMEOUT_S + 30)
        async with session.get(self._url, params=params, headers=self._headers(), timeout=timeout) as reply:
            if reply.status != HTTPStatus.OK:
                return ""
            async for line in reply.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return ""
                metadata = event["object"]["metadata"]
                version = metadata["resourceVersion"]
                if event["type"] == "DELETED":
                    self._slices.pop(metadata["name"], None)
                elif event["type"] in {"ADDED", "MODIFIED"}:
                    self._slices[metadata["name"]] = event["object"]
                if event["type"] != "BOOKMARK":
                    self._tell()
        return version

    def _tell(self) -> None:
        self._on_workers(workers_of(self._slices.values()).values())
