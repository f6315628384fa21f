"""The samples of an unfinished measurement, kept in a file beside the artifact until it is written."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coda_engine.contract.models import canonical_digest
from coda_engine.contract.profile import FullKey
from coda_engine.profiling.plan import Effort, MeasurementPlan, Part, Spot

_SHAPE = 1


class SampleFile:
    """Keeps samples over an interruption; one measurement of one configuration at a time.

    Args:
        path: The file.
        key: The engine's full key: samples of another one are not taken.
        effort: Quick or full: samples of the other kind are not taken.
    """

    def __init__(self, path: Path, key: FullKey, effort: Effort) -> None:
        self._path = path
        self._head = {"shape": _SHAPE, "key": canonical_digest(key), "effort": asdict(effort)}

    def read(self) -> tuple[MeasurementPlan, dict[Spot, list[float]], float] | None:
        """Return the plan, its samples so far and the seconds that they took; None when there is nothing of use."""
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if any(document[name] != _plain(value) for name, value in self._head.items()):
                return None
            rows = [(_spot(row["spot"]), [float(ms) for ms in row["samples_ms"]]) for row in document["rows"]]
            speed, elapsed_s = float(document["tokens_per_s"]), float(document["elapsed_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        effort = Effort(**{name: _tuples(value) for name, value in document["effort"].items()})
        return MeasurementPlan(tuple(spot for spot, _ in rows), speed, effort), dict(rows), elapsed_s

    def write(self, plan: MeasurementPlan, samples: Mapping[Spot, list[float]], elapsed_s: float) -> None:
        """Keep what was measured so far, in one move."""
        document = self._head | {
            "tokens_per_s": plan.tokens_per_s,
            "elapsed_s": elapsed_s,
            "rows": [{"spot": asdict(spot), "samples_ms": samples.get(spot, [])} for spot in plan.spots],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f"{self._path.name}.writing")
        unfinished.write_text(json.dumps(document), encoding="utf-8")
        unfinished.replace(self._path)

    def remove(self) -> None:
        """Remove the file: the measurement is over."""
        self._path.unlink(missing_ok=True)


def sample_file_path(artifact: Path) -> Path:
    """Return where the samples of the measurement that makes ``artifact`` are kept meanwhile."""
    return artifact.with_name(f".{artifact.name}.samples")


def _spot(fields: dict[str, Any]) -> Spot:
    return Spot(**(fields | {"part": Part(fields["part"])}))


def _plain(value: object) -> object:
    return json.loads(json.dumps(value))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
