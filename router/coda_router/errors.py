"""Errors of the router.

::

    RouterError
    ├── ConfigurationError   the router cannot start as asked; one line, names the option and the remedy
    ├── Refusal              a request that the router answers itself, with a status and a reason
    └── WorkerLostError      a worker's connection failed before its reply was complete
"""

from collections.abc import Iterable
from dataclasses import dataclass

from coda_router.faults import EngineFault


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
        allow: The methods that the path takes, separated by commas; None where the method was not wrong.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    close: bool = False
    allow: str | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


def unknown_model(model: str | None, served: Iterable[str]) -> Refusal:
    """Return the refusal of a model that does not exist for a client.

    Args:
        model: The name that it asked for.
        served: The names that do exist for it.
    """
    return Refusal(
        404,
        "model_not_found",
        f"the model {model!r} does not exist here; served: {', '.join(served) or 'none'}",
        param="model",
    )


class WorkerLostError(RouterError):
    """A worker's connection failed before its reply was complete.

    Attributes:
        fault: What was wrong.
        was_reused: The connection had served a request before, so the worker may just have closed it as idle.
    """

    def __init__(self, fault: EngineFault, message: str, *, was_reused: bool = False) -> None:
        super().__init__(message)
        self.fault = fault
        self.was_reused = was_reused
