"""Puts a router together and serves it until it is told to end."""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator

import uvicorn

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.interface import ENV_CLUSTER_SECRET_FILE
from coda_engine.contract.settings import Settings
from coda_router.auth.keys import ApiKeys
from coda_router.auth.reading import read_api_keys
from coda_router.config import RouterConfig, is_loopback
from coda_router.conversations import Conversations
from coda_router.decision_file import DecisionFile
from coda_router.dispatch import Dispatcher
from coda_router.edge.admin import make_admin_app
from coda_router.edge.client import ClientProtocol
from coda_router.edge.gateway import Gateway
from coda_router.edge.models import ModelCatalog
from coda_router.errors import ConfigurationError
from coda_router.fleet.endpoints import EndpointWatcher
from coda_router.identity import IdentityWriter
from coda_router.live_settings import LiveSettings
from coda_router.metrics import RouterMetrics, WatchedFile
from coda_router.relay import Relay
from coda_router.responses import ResponseMap
from coda_router.sessions import SessionMap
from coda_router.watching import fingerprint, watch

FIRST_LOOK_TIMEOUT_S = 2.0
"""Longest time to wait for a first word of every worker before serving."""

IDLE_CONNECTION_S = 75
"""Time that a client's connection may stay unused."""

BACKLOG = 1024
"""Connections that the kernel queues."""

_log = logging.getLogger("coda.router")


class Router:
    """One router: all its parts, wired.

    Raises:
        ConfigurationError: A file that the configuration names cannot be used.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._keys = ApiKeys()
        self._settings = LiveSettings(Settings())
        watched = (config.settings_file, config.api_keys_dir)
        # Before they are read: what changes from here on is noticed.
        self._seen = {path: fingerprint(path) for path in watched if path is not None}
        self._load_keys()
        self._load_settings()
        if config.api_keys_dir is not None and config.cluster_secret is None:
            _log.warning(
                "API keys without a cluster secret: engines cannot tell tenants apart, so equal prompts share KV and "
                "timing tells of it; give --cluster-secret-file FILE here and the same file to the engines (%s)",
                ENV_CLUSTER_SECRET_FILE,
            )
        sessions = SessionMap(config.max_sessions, config.session_ttl_s)
        self._decision_file = DecisionFile(config.decision_log) if config.decision_log is not None else None
        self.dispatcher = Dispatcher(
            config.router_id,
            config.internal_token,
            self._settings,
            sessions,
            config.holding,
            config.silence_limit_s,
            decision_file=self._decision_file,
        )
        self._metrics = RouterMetrics(self.dispatcher, self._keys)
        identity = IdentityWriter(config.router_id, config.cluster_secret)
        self.app = Gateway(
            relay=Relay(self.dispatcher, identity, self._metrics.relay_event, self._metrics.engine_fault),
            conversations=Conversations(identity, sessions, ResponseMap()),
            catalog=ModelCatalog(self.dispatcher.fleet, time.time()),
            keys=self._keys,
            hygiene=lambda: self._settings.hygiene,
            metrics=self._metrics,
            max_body_bytes=config.max_body_bytes,
            keep_alive_s=config.keep_alive_s,
            admin=make_admin_app(
                self.dispatcher,
                self._settings,
                self._metrics,
                self._keys,
                router_id=config.router_id,
                internal_token=config.internal_token,
                is_loopback=is_loopback(config.host),
            ),
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the workers and the watched files while the context is open."""
        fleet = self.dispatcher.fleet
        async with fleet, self._decision_file or contextlib.nullcontext():
            tasks = [asyncio.create_task(task) for task in self._watches()]
            fleet.reconcile(self._config.workers)
            await fleet.wait_until_known(FIRST_LOOK_TIMEOUT_S)
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _watches(self) -> Iterator[Coroutine[object, object, None]]:
        if self._config.discovery is not None:
            yield EndpointWatcher(self._config.discovery, self.dispatcher.fleet.reconcile).run()
        if self._config.settings_file is not None:
            yield watch(
                self._config.settings_file,
                self._seen[self._config.settings_file],
                self._load_settings,
                on_refused=lambda: self._metrics.reload_refused(WatchedFile.SETTINGS),
            )
        if self._config.api_keys_dir is not None:
            yield watch(
                self._config.api_keys_dir,
                self._seen[self._config.api_keys_dir],
                self._load_keys,
                on_refused=lambda: self._metrics.reload_refused(WatchedFile.API_KEYS),
            )

    def _load_settings(self) -> None:
        path = self._config.settings_file
        if path is None:
            return
        try:
            self._settings.replace(Settings.parse(path.read_bytes()))
        except OSError as error:
            raise ConfigurationError(f"--settings-file {path}: cannot be read: {error}") from error
        except DocumentError as error:
            raise ConfigurationError(f"--settings-file {path}: {'; '.join(str(error).splitlines())}") from error

    def _load_keys(self) -> None:
        if self._config.api_keys_dir is not None:
            self._keys.replace(read_api_keys(self._config.api_keys_dir))
            _log.info("%d API keys in force", len(self._keys))


class _Server(uvicorn.Server):
    """uvicorn's server that ends with status 0 on SIGTERM and SIGINT, instead of raising the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take both signals while serving; a second SIGINT ends at once."""
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self.handle_exit, signal_number, None)
        try:
            yield
        finally:
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signal_number)


def serve(config: RouterConfig) -> None:
    """Run a router until SIGTERM or SIGINT; requests in flight then get ``config.grace_s`` to end.

    Raises:
        ConfigurationError: It cannot start as asked.
    """
    listener = bind(config.host, config.port)
    try:
        router = Router(config)
    except ConfigurationError:
        listener.close()
        raise
    server = make_server(router, config)
    # What exists by now stays for ever; a collector that walks it again and again only delays events.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run_router(router, server, listener))


def make_server(router: Router, config: RouterConfig) -> uvicorn.Server:
    """Return the HTTP server for a router; it serves a socket that :func:`bind` made."""
    return _Server(
        uvicorn.Config(
            router.app,
            loop="uvloop",
            http=ClientProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=math.ceil(config.grace_s),
            backlog=BACKLOG,
        )
    )


async def run_router(router: Router, server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until the server is told to exit, with the router's own tasks around it."""
    async with router.running():
        listener.listen(BACKLOG)
        host, port = listener.getsockname()[:2]
        _log.info("listening on http://%s:%d", host, port)
        await server.serve(sockets=[listener])
        _log.info("ended")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address.

    Raises:
        ConfigurationError: The address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_failure.pop_all()
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --host or --port, or end what listens there"
        ) from error
    listener.setblocking(False)
    return listener
