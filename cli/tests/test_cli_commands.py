import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_router.auth.keys import ApiKeys
from coda_router.auth.reading import read_api_keys

Coda = Callable[..., Any]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_help_lists_every_command(coda: Coda) -> None:
    out = coda("--help").out
    for name in ("up", "down", "status", "router", "key", "profile", "model", "demo", "bench", "validate"):
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


def test_a_new_key_and_its_document_are_what_a_router_takes(coda: Coda, tmp_path: Path) -> None:
    made = coda("key", "--tenant", "alice", "--model", "small", "--model", "large", "--requests-per-minute", 60)
    key, document = made.err.strip(), made.out
    assert key not in document
    (tmp_path / "laptop").write_text(document)
    keys = ApiKeys()
    keys.replace(read_api_keys(tmp_path))
    found = keys.account_of({b"x-api-key": key.encode()}).key
    assert (found.tenant, found.models) == ("alice", {"small", "large"})
    assert (found.limits.requests_per_minute, found.limits.max_concurrent_requests) == (60, None)


def test_without_options_a_key_s_document_is_only_its_hash(coda: Coda) -> None:
    document = json.loads(coda("key").out)
    assert document.keys() == {"keyHash"}


def test_a_key_that_no_router_would_take_is_refused_by_field(coda: Coda) -> None:
    outcome = coda("key", "--requests-per-minute", 0)
    assert outcome.code == 2
    assert "requestsPerMinute: input should be greater than or equal to 1" in outcome.err
    assert outcome.out == ""
