"""Finished measurements, kept in a folder so that an interrupted benchmark goes on where it was.

A measurement is found by a digest of everything that it depends on: what was measured, how, with which code, on
which machine. Anything else measured later has another name, so old results can never be taken for new ones.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import coda_engine
from coda_bench.report import machine_description
from coda_engine.contract.interface import VLLM_DISTRIBUTIONS
from coda_operator.desired import processes

_SUFFIX = ".measured.json"


@dataclass(frozen=True, slots=True)
class Finished:
    """The folder of finished measurements.

    Attributes:
        folder: Where they are; None keeps nothing.
        surroundings: What every measurement depends on.
    """

    folder: Path | None
    surroundings: Mapping[str, str]

    def get(self, what: Mapping[str, Any]) -> Any | None:
        """Return the result of the measurement that ``what`` describes, or None when it was not finished."""
        path = self._path(what)
        if path is None:
            return None
        try:
            return json.loads(path.read_text())["result"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # written by something else, or cut off by a full disk: measured again

    def put(self, what: Mapping[str, Any], result: Any) -> None:
        """Keep the result of a measurement; a crash leaves all of it or nothing."""
        path = self._path(what)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps({"what": what, "surroundings": dict(self.surroundings), "result": result}))
        os.replace(whole, path)

    def forget(self) -> None:
        """Remove every finished measurement of the folder, and nothing else in it."""
        if self.folder is not None and self.folder.is_dir():
            for path in self.folder.glob(f"*{_SUFFIX}"):
                path.unlink(missing_ok=True)

    def _path(self, what: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        text = json.dumps([what, dict(self.surroundings)], sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{_SUFFIX}"


def surroundings(model_path: Path) -> dict[str, str]:
    """Return what every measurement depends on: machine, vLLM, the engine's code, the model."""
    return {
        "machine": machine_description(),
        "vllm": _vllm_version(),
        "engine_code": _code_digest(Path(coda_engine.__file__).parent.rglob("*.py")),
        "load_code": _code_digest(_load_code()),
        "model": _model_digest(model_path),
    }


def _vllm_version() -> str:
    for name in VLLM_DISTRIBUTIONS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return ""


def _load_code() -> list[Path]:
    """Return the sources that decide what an engine is started with and asked; figures are made anew each time."""
    here = Path(__file__).parent
    own = [here / name for name in ("replay.py", "session_runs.py", "server.py", "first_token.py", "calibration.py")]
    return [*own, *(here.parent / "workload").glob("*.py"), Path(processes.__file__)]


def _code_digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _model_digest(folder: Path) -> str:
    digest = hashlib.sha256(str(folder).encode())
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()[:16]
