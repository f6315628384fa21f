from pathlib import Path

from coda_cli.up.layout import child_environment


def test_processes_are_not_told_what_another_engine_was_told():
    surroundings = {"CODA_PAGE_FILES": "/dev/shm/another", "VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"}
    environment = child_environment(surroundings, Path("/tmp/run"), Path("/tmp/cache"))
    assert "CODA_PAGE_FILES" not in environment
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["TMPDIR"] == "/tmp/run"


def test_processes_keep_their_byte_code_whatever_the_surroundings_say():
    environment = child_environment({"PYTHONDONTWRITEBYTECODE": "1"}, Path("/tmp/run"), Path("/tmp/cache"))
    assert "PYTHONDONTWRITEBYTECODE" not in environment
