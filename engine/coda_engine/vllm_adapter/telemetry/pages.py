"""The pages of one engine: their names and sizes, and the document on each."""

from collections.abc import Mapping
from typing import TypedDict

from coda_engine.vllm_adapter.telemetry.histogram import HistogramState

SNAPSHOT_PAGE = "snapshot"
"""An EngineSnapshot (contract), JSON; its version is the page's."""

SESSIONS_PAGE = "sessions"
"""A :class:`SessionsDocument`, JSON."""

DECISIONS_PAGE = "decisions"
"""A :class:`DecisionsDocument`, JSON."""

CONTROL_PAGE = "control"
"""A :class:`ControlDocument`, JSON."""

MEASURES_PAGE = "measures"
"""A :class:`MeasuresDocument`, JSON."""

CAPACITIES = {
    SNAPSHOT_PAGE: 256 * 1024,
    SESSIONS_PAGE: 1024 * 1024,
    DECISIONS_PAGE: 256 * 1024,
    CONTROL_PAGE: 192 * 1024,
    MEASURES_PAGE: 32 * 1024,
}
"""Page to its capacity, bytes (each file is twice as large: two slots)."""


class SessionsDocument(TypedDict):
    """The whole session table.

    ``rows``: key, hbm_tokens, shadow_tokens, last_use_s, version of the last change. ``removed``: key and version
    of the removal. ``complete_since``: the oldest version from which rows and removals tell every change. ``waiting``:
    of rows whose session waits for a tool, the tool and since when, Unix seconds.
    """

    instance_id: str
    version: int
    complete_since: int
    rows: list[tuple[str, int, int, float, int]]
    removed: list[tuple[str, int]]
    waiting: dict[str, tuple[str, float]]


class DecisionsDocument(TypedDict):
    """The latest state-admission decisions."""

    next: int
    decisions: list[dict[str, object]]


class MeasuresDocument(TypedDict):
    """What metrics need beyond the snapshot: by name (see ``catalogue``) without prefix, then by label, "" = none."""

    values: Mapping[str, Mapping[str, float]]
    histograms: Mapping[str, Mapping[str, HistogramState]]


class ControlDocument(TypedDict):
    """What the engine runs with: keys, settings and profile in force."""

    instance_id: str
    spec_key_digest: str
    full_key: dict[str, object]
    settings_digest: str
    settings: dict[str, object]
    profile_digest: str | None
    profile: dict[str, object] | None
