"""What a router is started with: parsed once, handed down, never read again from anywhere."""

import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from coda_router.edge.events import KEEP_ALIVE_S
from coda_router.errors import ConfigurationError
from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.endpoints import KubernetesService
from coda_router.fleet.guard import SILENCE_LIMIT_S
from coda_router.holding import HoldingLimits


def new_router_id() -> str:
    """Return a name that no other router process has, and this one will not have again after a restart."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything that a router is started with.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 = any free one.
        workers: Static workers; empty when they are discovered.
        discovery: The Kubernetes Service whose endpoints are the workers; None = static workers.
        settings_file: Settings document, read again when it changes; None = defaults.
        decision_log: File that gets a JSON line for each placement decision; None = none.
        api_keys_dir: Folder of API keys, read again when it changes; None = no keys (loopback only).
        cluster_secret: Signs identities; None = engines work from the session name as it is.
        internal_token: For engines' internal endpoints and this router's own; None = the engines' are open, and its
            own are on loopback only.
        router_id: This process, as engines attribute requests to it.
        max_body_bytes: Largest request body taken, bytes.
        max_sessions: Most sessions whose last placement is remembered; about 49 bytes each.
        session_ttl_s: Time after which an unused session is forgotten, seconds.
        grace_s: Time that requests in flight get when the router is told to end, seconds.
        keep_alive_s: Silence after which a stream says that it lives, seconds; 0 = never.
        silence_limit_s: Silence after which a request is taken from an engine that does not move on, seconds.
        holding: How much is held back while no engine can take requests.
    """

    host: str
    port: int
    workers: tuple[WorkerAddress, ...] = ()
    discovery: KubernetesService | None = None
    settings_file: Path | None = None
    decision_log: Path | None = None
    api_keys_dir: Path | None = None
    cluster_secret: bytes | None = None
    internal_token: str | None = None
    router_id: str = field(default_factory=new_router_id)
    max_body_bytes: int = 32 * 1024 * 1024
    max_sessions: int = 1_000_000
    session_ttl_s: float = 3600.0
    grace_s: float = 30.0
    keep_alive_s: float = KEEP_ALIVE_S
    silence_limit_s: float = SILENCE_LIMIT_S
    holding: HoldingLimits = field(default_factory=HoldingLimits)

    def __post_init__(self) -> None:
        if bool(self.workers) == (self.discovery is not None):
            raise ConfigurationError("give either --workers URL... or --discover NAMESPACE/SERVICE")
        names = [worker.name for worker in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"--workers: {name} is given more than once")
        if self.api_keys_dir is None and not is_loopback(self.host):
            raise ConfigurationError(
                f"--host {self.host} is reachable from other machines, and there are no API keys: "
                "give --api-keys-dir DIR, or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_secret_file(path: Path, option: str) -> str:
    """Return the content of a secret's file without surrounding white space.

    Raises:
        ConfigurationError: The file cannot be read or is empty; names ``option``.
    """
    try:
        content = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{option} {path}: cannot be read: {error}") from error
    if not content:
        raise ConfigurationError(f"{option} {path}: the file is empty")
    return content
