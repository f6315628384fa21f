"""Errors of the operator.

::

    OperatorError
    ├── SchemaError       a model has no structural schema (only while generating the CRDs)
    ├── PodTemplateError  spec.engine.podTemplate cannot be merged into the pod
    ├── NameTakenError    an object of a child's name exists and is not this CodaCluster's
    ├── ApiError          the API server refused; carries status, reason and what was asked
    └── JobError          the profiling Job cannot go on; its message is the Job's last words
"""


class OperatorError(Exception):
    """Base of every error raised by ``coda_operator``."""


class SchemaError(OperatorError):
    """A model cannot be written as a structural schema; the message names the field."""


class PodTemplateError(OperatorError):
    """The pod template patch does not fit; the message names the field and what is allowed."""


class NameTakenError(OperatorError):
    """A child's name is taken by an object that this CodaCluster does not own."""


class ApiError(OperatorError):
    """The API server answered with an error.

    Attributes:
        status: HTTP status code.
        reason: Kubernetes' machine-readable reason, for example ``NotFound``.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    @property
    def is_not_found(self) -> bool:
        """Whether the object does not exist."""
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """Whether the object exists already or has changed meanwhile."""
        return self.status == 409


class JobError(OperatorError):
    """The profiling Job failed for a reason that a person can act on."""
