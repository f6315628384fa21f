"""kopf's part: what it watches, and what an event does (it only wakes the loop of its CodaCluster).

Only ``on.event`` handlers: with those, kopf adds no finalizer, keeps no state in annotations and patches
nothing, so none of its ways to leave an object hanging can happen. Handlers are coroutines: kopf runs plain
functions in threads, where the loops must not be touched.
"""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import kopf

from coda_operator.config import OperatorConfig
from coda_operator.desired.cluster import CLUSTER_LABEL
from coda_operator.kube.client import KubeClient, login
from coda_operator.kube.resources import CODA_CLUSTERS, CODA_PROFILES, DEPLOYMENTS, JOBS, PODS, Resource
from coda_operator.loops import Loops
from coda_operator.observed import Key
from coda_operator.profile_object import MANAGED_BY, MANAGED_BY_LABEL
from coda_operator.reconcile import Reconciler
from coda_operator.telemetry import Telemetry
from coda_operator.watchdog import Watchdog

_CHILDREN = (DEPLOYMENTS, JOBS, PODS)
_SERVER_TIMEOUT_S = 240  # the API server takes whole seconds only
_CLIENT_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 10.0
_LIST_CHUNK = 500


class Operator:
    """The running operator: connections, loops and the watchdog over kopf's watches."""

    def __init__(self, config: OperatorConfig) -> None:
        self._config = config
        self._resources = AsyncExitStack()
        self._loops: Loops | None = None
        self._watchdog: Watchdog | None = None

    @property
    def loops(self) -> Loops:
        """The loops; only between start and stop."""
        if self._loops is None:
            raise kopf.TemporaryError("the operator is starting", delay=1)
        return self._loops

    async def start(self) -> None:
        """Open the connections and start the watchdog."""
        kube = await self._resources.enter_async_context(KubeClient(login))
        telemetry = await self._resources.enter_async_context(Telemetry())
        self._loops = Loops(Reconciler(kube, telemetry, self._config.images).reconcile)
        self._watchdog = await self._resources.enter_async_context(Watchdog(kube, self._loops, self._config.namespaces))

    async def stop(self) -> None:
        """End loops, watchdog and connections."""
        if self._loops is not None:
            await self._loops.close()
        await self._resources.aclose()

    def health(self) -> str:
        """Return what is alive.

        Raises:
            RuntimeError: The watches are dead; the process should be replaced.
        """
        if self._watchdog is None:
            return "starting"
        return self._watchdog.check()


def register(registry: kopf.OperatorRegistry, operator: Operator) -> None:
    """Register everything that kopf calls."""

    @kopf.on.login(registry=registry)
    def log_in(**_: Any) -> kopf.ConnectionInfo:
        return login()

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        await operator.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await operator.stop()

    @kopf.on.probe(registry=registry, id="watches")
    async def health(**_: Any) -> str:
        return operator.health()

    @kopf.on.event(*_selector(CODA_CLUSTERS), registry=registry)
    async def cluster_event(namespace: str | None, name: str | None, **_: Any) -> None:
        operator.loops.wake(Key(str(namespace), str(name)))

    @kopf.on.event(*_selector(CODA_PROFILES), registry=registry)
    async def profile_event(namespace: str | None, **_: Any) -> None:
        operator.loops.wake_namespace(str(namespace))

    async def child_event(namespace: str | None, labels: Mapping[str, str], **_: Any) -> None:
        cluster = labels.get(CLUSTER_LABEL)
        if cluster:
            operator.loops.wake(Key(str(namespace), cluster))

    for child in _CHILDREN:
        kopf.on.event(*_selector(child), registry=registry, id=f"child-{child.plural}")(child_event)


def configure(settings: kopf.OperatorSettings) -> None:
    """Set what keeps watches alive and small."""
    settings.posting.enabled = False  # Events are this operator's own, see report
    settings.scanning.disabled = True  # needs no right to watch CustomResourceDefinitions and Namespaces
    settings.watching.server_timeout = _SERVER_TIMEOUT_S
    settings.watching.client_timeout = _CLIENT_TIMEOUT_S
    settings.watching.connect_timeout = _CONNECT_TIMEOUT_S
    settings.watching.chunk_size = _LIST_CHUNK
    for child in _CHILDREN:
        # The API server sends only these: a cluster's other pods never reach this process.
        settings.watching.label_selectors[child.group, child.version, child.plural] = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
    for chatty in ("kopf.objects", "kopf.activities.probe"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _selector(resource: Resource) -> tuple[str, str, str]:
    return resource.group, resource.version, resource.plural
