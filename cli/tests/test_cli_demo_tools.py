import json
from pathlib import Path

import pytest

from coda_cli.demo.tools import Workbench, definitions


def test_every_tool_holds_the_model_to_its_schema() -> None:
    for definition in definitions():
        function = definition["function"]
        assert function["strict"] is True
        assert function["parameters"]["additionalProperties"] is False
        assert function["parameters"]["required"] == list(function["parameters"]["properties"])


def test_files_are_listed_and_read(tmp_path: Path) -> None:
    workbench = Workbench(tmp_path)
    assert workbench.run("list_files", "{}").splitlines() == ["README.md", "basket.py", "prices.csv"]
    assert "apple,3" in workbench.run("read_file", '{"path": "prices.csv"}')


def test_every_offered_snippet_runs(tmp_path: Path) -> None:
    workbench = Workbench(tmp_path)
    (tool,) = (item["function"] for item in definitions() if item["function"]["name"] == "run_python")
    outputs = [
        workbench.run("run_python", json.dumps({"code": code}))
        for code in tool["parameters"]["properties"]["code"]["enum"]
    ]
    assert outputs == ["12", "180.0", "4"]


def test_a_note_is_written_inside_the_folder_and_bounded(tmp_path: Path) -> None:
    answer = Workbench(tmp_path).run("write_file", json.dumps({"path": "notes.md", "content": "x" * 5_000}))
    assert answer == "wrote 120 characters to notes.md"
    assert (tmp_path / "notes.md").read_text() == "x" * 120


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run_python", '{"code": "import shutil; shutil.rmtree(\'/\')"}'),
        ("read_file", '{"path": "/etc/passwd"}'),
        ("read_file", '{"path": "../secret"}'),
        ("write_file", '{"path": "basket.py", "content": "x"}'),
        ("read_file", '{"path": ["basket.py"]}'),
        ("read_file", "{}"),
        ("read_file", "[]"),
        ("read_file", "{not json"),
        ("delete_everything", "{}"),
    ],
)
def test_what_is_not_offered_is_refused_in_words(tmp_path: Path, tool: str, arguments: str) -> None:
    workbench = Workbench(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert workbench.run(tool, arguments).startswith("error: ")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
