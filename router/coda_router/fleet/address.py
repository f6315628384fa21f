"""Where a worker listens."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from coda_router.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker's name and place.

    Attributes:
        name: The worker's name in the fleet, logs and metrics (a pod's name, or host:port).
        host: Host name or IP address, without brackets.
        port: TCP port.
    """

    name: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """``host:port`` as a URL and a Host header write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The worker's base URL without a trailing slash."""
        return f"http://{self.authority}"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the address in a worker URL such as ``http://10.0.0.7:8000``.

        Raises:
            ConfigurationError: Not such a URL.
        """
        remedy = "give workers as http://HOST:PORT"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigurationError(f"--workers {url!r}: {error}; {remedy}") from error
        if parts.scheme != "http" or not parts.hostname or port is None:
            raise ConfigurationError(f"--workers {url!r} is not a worker's URL; {remedy}")
        if parts.path not in {"", "/"} or parts.query or parts.username:
            raise ConfigurationError(f"--workers {url!r} has more than host and port; {remedy}")
        address = cls(name="", host=parts.hostname, port=port)
        return cls(name=address.authority, host=address.host, port=address.port)
