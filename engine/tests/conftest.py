"""Fixtures of the engine's tests: the built-in model, vLLM's configuration, real schedulers and engines."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

VLLM_PREFIX = "test_vllm_"


def pytest_configure(config):
    """Set what vLLM reads when it is imported: one thread, equal bits, one process, no network."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_ignore_collect(collection_path, config):
    """Do not import vLLM (10 s) for a run that deselects its tests."""
    if collection_path.name.startswith(VLLM_PREFIX) and "not vllm" in (config.option.markexpr or ""):
        return True
    return None


def pytest_pycollect_makemodule(module_path, parent):
    """Import vLLM before its test modules do: its imports warn, and warnings are errors here."""
    if module_path.name.startswith(VLLM_PREFIX) and importlib.util.find_spec("vllm") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("vllm.v1.engine.core")


def pytest_collection_modifyitems(items):
    """Mark what needs vLLM; vLLM's own deprecations are not this project's errors."""
    for item in items:
        if item.path.name.startswith(VLLM_PREFIX):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The built-in model as a Hugging Face folder; made by ``coda model`` when absent (35 s)."""
    from coda_cli.model.catalog import default_model_dir

    folder = default_model_dir(os.environ) / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        subprocess.run([sys.executable, "-m", "coda_cli", "model"], check=True, timeout=600, env=environment)
    return folder


@pytest.fixture(scope="session")
def vllm_config(model_folder):
    """A resolved vLLM configuration: blocks of 32 tokens, steps of at most 512, 16 running, 8k context."""
    from scheduler_harness import resolve_config

    return resolve_config(model_folder)


@pytest.fixture
def shadow_folder():
    """An absent folder in shared memory for a shadow store; it and what lies beside it are removed afterwards."""
    parent = Path(tempfile.mkdtemp(prefix="coda-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield parent / "shadow"
    shutil.rmtree(parent)


@pytest.fixture
def opened(shadow_folder):
    """Opens the index in ``shadow_folder``, as often as it is called; all are closed afterwards."""
    from shadow_harness import open_index

    indexes = []

    def open_one(**options):
        indexes.append(open_index(shadow_folder, **options))
        return indexes[-1]

    yield open_one
    for index in indexes:
        index.close()


@pytest.fixture
def index(opened):
    """The index in ``shadow_folder``."""
    return opened()


@pytest.fixture
def pages(shadow_folder):
    """The only rank's pages in ``shadow_folder``."""
    from shadow_harness import open_pages

    pages = open_pages(shadow_folder)
    yield pages
    pages.close()


@pytest.fixture
def nursery(shadow_folder):
    """Forks real processes that use the store in ``shadow_folder``."""
    from shadow_harness import Nursery

    nursery = Nursery(shadow_folder)
    yield nursery
    nursery.close()
