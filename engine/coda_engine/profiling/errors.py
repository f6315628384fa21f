"""Errors of profiling.

::

    ProfilingError
    ├── EngineRequestError   the engine is not there, refused, or answered something else
    ├── EngineBusyError      other requests run on the engine, so that nothing can be measured
    └── MeasurementError     what was measured is not a cost curve, or does not predict its held-out points
"""


class ProfilingError(Exception):
    """Base of every error of profiling; no artifact has been written."""


class EngineRequestError(ProfilingError):
    """The engine cannot be reached, refused the request, or answered something unexpected.

    Attributes:
        status: HTTP status, 0 without an answer.
        body: The answer's body, decoded, at most 2,000 characters.
    """

    def __init__(self, message: str, status: int = 0, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class EngineBusyError(ProfilingError):
    """The engine serves other requests; a profile measured beside them would be wrong."""


class MeasurementError(ProfilingError):
    """The samples are not a usable curve; nothing is written rather than something wrong."""
