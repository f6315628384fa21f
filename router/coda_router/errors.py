"""Errors of the router.

::

    RouterError
    ├── ConfigurationError   the router cannot start as asked; one line, names the option and the remedy
    ├── Refusal              a request that the router answers itself, with a status and a reason
    └── WorkerLostError      a worker's connection failed before its reply was complete
"""

from dataclasses import dataclass


class RouterError(Exception):
    """Base of every error raised by ``coda_router``."""


class ConfigurationError(RouterError):
    """The router cannot start as asked; the message is one line that says what to change."""


@dataclass(eq=False, slots=True)
class Refusal(RouterError):
    """A request that the router answers itself; each protocol has its own shape for it.

    Attributes:
        status: HTTP status.
        code: Machine-readable reason, also the metric label, for example ``model_not_found``.
        message: For people: what was wrong and what to do.
        param: The request's field that was wrong; None where no single field is.
        retry_after_s: Seconds after which a retry makes sense; None where it does not.
        close: End the connection afterwards, because the request's body was not read whole.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    close: bool = False

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


class WorkerLostError(RouterError):
    """A worker's connection failed before its reply was complete.

    Attributes:
        was_reused: The connection had served a request before, so the worker may just have closed it as idle.
    """

    def __init__(self, message: str, *, was_reused: bool = False) -> None:
        super().__init__(message)
        self.was_reused = was_reused
