"""What metrics need beyond the snapshot, gathered on the engine's thread at most once a second."""

import json
from collections.abc import Callable, Mapping, Sized

from coda_engine.vllm_adapter.reclaim.reclaim import Reclaim
from coda_engine.vllm_adapter.scheduler.admission import StateAdmission
from coda_engine.vllm_adapter.telemetry.histogram import HistogramState
from coda_engine.vllm_adapter.telemetry.pages import MeasuresDocument
from coda_engine.vllm_adapter.telemetry.shadow_figures import ShadowFigures, ShadowReader
from coda_engine.vllm_adapter.telemetry.startup import StartupCosts

_UNLABELLED = ""


class MeasuresGatherer:
    """Reads the parts of the engine.

    Args:
        shadow: Reads the CPU shadow.
        startup: Startup costs of resumed requests.
        admission: None while it is closed.
        reclaim: None while it is closed.
        sessions: The session table; None when residency cannot be known.
    """

    def __init__(
        self,
        shadow: ShadowReader,
        startup: StartupCosts,
        admission: StateAdmission | None,
        reclaim: Reclaim | None,
        sessions: Sized | None,
    ) -> None:
        self._shadow = shadow
        self._startup = startup
        self._admission = admission
        self._reclaim = reclaim
        self._sessions = sessions

    def gather(self) -> Callable[[int], bytes]:
        """Return the encoder of the :class:`MeasuresDocument` as it is now."""
        document = MeasuresDocument(values=self._values(), histograms=self._histograms())
        return lambda _version: json.dumps(document, separators=(",", ":")).encode()

    def _values(self) -> dict[str, dict[str, float]]:
        values = _shadow_values(self._shadow.figures())
        if self._admission is not None:
            values["unconfirmed_selections"] = {_UNLABELLED: self._admission.unconfirmed}
        if self._sessions is not None:
            values["sessions"] = {_UNLABELLED: len(self._sessions)}
        if self._reclaim is not None:
            window, gaps = self._reclaim.window, self._reclaim.gaps
            values |= {
                "victim_looks": {_UNLABELLED: window.looks},
                "victim_look_seconds": {_UNLABELLED: window.look_seconds},
                "turns_ended": dict(gaps.turns),
                "tool_gaps_open": gaps.open_by_kind(),
                "tools_learnt": {_UNLABELLED: self._reclaim.learnt_tools},
            }
        return values

    def _histograms(self) -> dict[str, Mapping[str, HistogramState]]:
        histograms: dict[str, Mapping[str, HistogramState]] = {
            "startup_seconds": {path.value: state for path, state in self._startup.states().items()}
        }
        if self._admission is not None:
            histograms["selection_seconds"] = {_UNLABELLED: self._admission.log.selection.state()}
        return histograms


def _shadow_values(shadow: ShadowFigures) -> dict[str, dict[str, float]]:
    counters, states = shadow.counters, shadow.pages_by_state
    plain = {
        "shadow_pinned_pages": states.get("pinned", 0),
        "shadow_restored_bytes": counters.restored_bytes,
        "shadow_restore_seconds": counters.restore_seconds,
        "shadow_published_bytes": counters.published_bytes,
        "shadow_publish_seconds": counters.publish_seconds,
        "shadow_index_repairs": shadow.repairs,
        "shadow_lock_timeouts": shadow.lock_timeouts,
    }
    values: dict[str, dict[str, float]] = {name: {_UNLABELLED: value} for name, value in plain.items()}
    values["shadow_pages_now"] = {state: count for state, count in states.items() if state != "pinned"}
    return values
