from pathlib import Path

import pytest

from coda_cli.up.layout import Folders, child_environment, engine_processes, remove_shadow, shadow_folder
from coda_engine.contract.interface import ENV_SHADOW_DIR
from coda_operator.spec import CodaClusterSpec


def test_processes_are_not_told_what_another_engine_was_told():
    surroundings = {"CODA_PAGE_FILES": "/dev/shm/another", "VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"}
    environment = child_environment(surroundings, Path("/tmp/run"), Path("/tmp/cache"))
    assert "CODA_PAGE_FILES" not in environment
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["TMPDIR"] == "/tmp/run"


def test_processes_keep_their_byte_code_whatever_the_surroundings_say():
    environment = child_environment({"PYTHONDONTWRITEBYTECODE": "1"}, Path("/tmp/run"), Path("/tmp/cache"))
    assert "PYTHONDONTWRITEBYTECODE" not in environment


@pytest.mark.parametrize(("scope", "names"), [("Pod", ["engine-0", "engine-1"]), ("Node", ["node", "node"])])
def test_engines_have_a_shadow_each_or_share_one_and_find_it_again(tmp_path, scope, names):
    spec = CodaClusterSpec.parse(
        {
            "model": {"name": "m", "source": {"hostPath": "/m"}},
            "engine": {"device": "cpu", "replicas": 2},
            "kvShadow": {"size": "1Gi", "scope": scope},
        }
    )
    folders = Folders(tmp_path / "scratch", tmp_path / "pages", shadow_folder("demo"))
    for _ in range(2):
        processes = engine_processes(spec, spec.spec_key("v"), folders, [1, 2], Path("/m"), Path("/p"), (0, 1))
        told = [process.env[ENV_SHADOW_DIR] for process in processes]
        assert told == [f"/dev/shm/coda-shadow-demo/{name}" for name in names]


def test_a_shadow_that_nobody_needs_any_more_is_removed(tmp_path):
    (tmp_path / "shadow" / "node").mkdir(parents=True)
    (tmp_path / "shadow" / "node" / "pages").write_bytes(b"x")
    remove_shadow(tmp_path / "shadow")
    remove_shadow(tmp_path / "shadow")
    assert list(tmp_path.iterdir()) == []
