"""Errors of the shadow store: there is one, because every one of them closes the feature for its reason."""

from coda_engine.contract.reasons import Reason


class ShadowError(Exception):
    """The shadow cannot be used; the engine serves without it.

    Attributes:
        reason: Why, as shown in the capability vector.
        detail: What is wrong, with the path and the remedy.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
