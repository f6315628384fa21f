import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Coda = Callable[..., Any]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_help_lists_every_command(coda: Coda) -> None:
    out = coda("--help").out
    for name in ("up", "down", "status", "router", "profile", "model", "demo", "bench", "validate"):
        assert f"\n  {name} " in out


def test_starting_the_command_imports_neither_torch_nor_vllm_nor_kopf() -> None:
    code = (
        "import sys, coda_cli.main as m; m.coda.list_commands(None); m.coda.get_command(None, 'up');"
        "print([n for n in ('torch', 'vllm', 'kopf', 'kubernetes', 'transformers', 'fastapi') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_example_is_valid(coda: Coda) -> None:
    for file in sorted(EXAMPLES.glob("*.yaml")):
        outcome = coda("validate", "-f", file)
        assert outcome.code == 0, outcome.err
        assert "is valid" in outcome.out


def test_status_says_when_nothing_runs(coda: Coda) -> None:
    assert "nothing runs here" in coda("status").out


def test_version_is_the_distributions(coda: Coda) -> None:
    assert coda("--version").out.startswith("coda 0.")
