"""The capability vector: which of Coda's features run in this engine, and why (not)."""

from dataclasses import dataclass

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import Capability
from coda_engine.vllm_adapter.log import logger


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a part of Coda is not there: what the capability vector will say of it."""

    reason: Reason
    detail: str


class CapabilityVector:
    """Feature to on/off with its reason; every change is logged once.

    A feature that a gate or an error has closed stays closed: settings cannot open it again.
    """

    def __init__(self) -> None:
        self._states: dict[Feature, Capability] = {}
        self._closed: set[Feature] = set()

    def set(self, feature: Feature, enabled: bool, reason: Reason, detail: str = "") -> None:
        """Record the state of ``feature``, unless it has been closed."""
        state = Capability(enabled=enabled, reason=reason, detail=detail)
        if feature in self._closed or self._states.get(feature) == state:
            return
        self._states[feature] = state
        log = logger.info if enabled or reason in _EXPECTED_OFF else logger.warning
        log("coda %s: %s (%s)%s", feature.value, "on" if enabled else "off", reason.value, f": {detail}" * bool(detail))

    def close(self, feature: Feature, reason: Reason, detail: str) -> None:
        """Switch ``feature`` off for the life of this engine."""
        self.set(feature, False, reason, detail)
        self._closed.add(feature)

    def close_after_error(self, feature: Feature, error: BaseException) -> None:
        """Switch ``feature`` off after an unexpected error in it; vLLM goes on without it."""
        if feature not in self._closed:
            logger.error("coda %s failed and is switched off", feature.value, exc_info=error)
        self.close(feature, Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")

    def is_closed(self, feature: Feature) -> bool:
        """Return whether ``feature`` is off for good."""
        return feature in self._closed

    def snapshot(self) -> dict[Feature, Capability]:
        """Return a copy of the vector."""
        return dict(self._states)


_EXPECTED_OFF = frozenset(
    {Reason.DISABLED_BY_SETTINGS, Reason.NOT_AVAILABLE, Reason.NO_PROFILE, Reason.NO_CLUSTER_SECRET}
)
