import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from coda_cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2-cpu.yaml"


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def coda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Outcome]:
    """Run the command line in this process, with state and cache of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["coda", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A folder that looks like a small model, enough for every check before the engine starts."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"max_position_embeddings": 8192, "num_hidden_layers": 30, "num_attention_heads": 9,'
        ' "num_key_value_heads": 3, "hidden_size": 576, "head_dim": 64}'
    )
    return folder


@pytest.fixture
def cluster_file(tmp_path: Path, model_dir: Path) -> Callable[..., Path]:
    """Write the example with one field set (or removed with None) and a local model folder; return the file."""

    def write(field: str = "", value: Any = None) -> Path:
        document = yaml.safe_load(EXAMPLE.read_text())
        document["spec"]["model"]["source"] = {"hostPath": str(model_dir)}
        document["spec"]["router"]["port"] = 23_700
        if field:
            *parents, last = field.split(".")
            target = document
            for parent in parents:
                target = target.setdefault(parent, {})
            if value is None:
                del target[last]
            else:
                target[last] = value
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    return write
