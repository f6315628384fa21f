"""Which kind of tool a call is: names of real clients, shell lines, and what cannot be read."""

import json

import pytest

from coda_engine.policy.tool_use import MAX_ARGUMENT_CHARS, ToolKind, ToolUse, shell_kind


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("cat README.md", ToolKind.READ),
        ("sed -n 1,40p a.py", ToolKind.READ),
        ("rg -n foo | head", ToolKind.SEARCH),
        ("git status", ToolKind.VCS),
        ("/usr/bin/git -C /a log", ToolKind.VCS),
        ("pytest -q", ToolKind.TEST),
        (".venv/bin/python -m pytest tests", ToolKind.TEST),
        ("uv run pytest", ToolKind.TEST),
        ("npm test", ToolKind.TEST),
        ("npm run test:unit", ToolKind.TEST),
        ("make test", ToolKind.TEST),
        ("go test ./...", ToolKind.TEST),
        ("make -j8", ToolKind.BUILD),
        ("cargo build --release", ToolKind.BUILD),
        ("docker build .", ToolKind.BUILD),
        ("pip install requests", ToolKind.INSTALL),
        ("sudo apt-get install -y jq", ToolKind.INSTALL),
        ("npm ci", ToolKind.INSTALL),
        ("uv sync", ToolKind.INSTALL),
        ("curl -s http://localhost", ToolKind.NETWORK),
        ("python app.py", ToolKind.RUN),
        ("./run.sh", ToolKind.RUN),
        ("mkdir -p a/b", ToolKind.EDIT),
        ("FOO=1 timeout 60 nice pytest", ToolKind.TEST),
        ("bash -lc 'cargo test'", ToolKind.TEST),
        ("python - <<'EOF'\nimport os\nEOF", ToolKind.RUN),
        ("for f in *; do cat $f; done", ToolKind.READ),
    ],
)
def test_a_shell_line_has_a_coarse_class(line, kind):
    assert shell_kind(line) is kind


def test_of_several_commands_the_slowest_counts():
    assert shell_kind("cd /repo && git pull && pip install -e . && pytest -q 2>&1 | tail -5") is ToolKind.INSTALL
    assert shell_kind("cd /repo && pytest -q | tail -5") is ToolKind.TEST
    assert shell_kind("ls; grep -rn x .") is ToolKind.SEARCH


@pytest.mark.parametrize(
    "line", ["", "   ", "frobnicate --all", "&& ;", "sudo", "A=1", "sudo " * 99, "'\"(", "bash -c"]
)
def test_a_line_that_says_nothing_is_other(line):
    assert shell_kind(line) is ToolKind.OTHER


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("Bash", {"command": "pytest -q"}, ToolKind.TEST),
        ("shell", {"command": ["bash", "-lc", "cargo build"]}, ToolKind.BUILD),
        ("exec_command", {"cmd": "git diff"}, ToolKind.VCS),
        ("functions.shell", {"command": "ls"}, ToolKind.READ),
        ("Read", {"file_path": "/a"}, ToolKind.READ),
        ("apply_patch", {}, ToolKind.EDIT),
        ("Grep", {}, ToolKind.SEARCH),
        ("Task", {}, ToolKind.AGENT),
        ("AskUserQuestion", {}, ToolKind.ASK),
        ("mcp__files__read_file", {}, ToolKind.READ),
        ("mcp__jira__create_ticket", {}, ToolKind.OTHER),
        ("bash", {"command": 7}, ToolKind.OTHER),
        ("bash", [1], ToolKind.OTHER),
    ],
)
def test_tools_of_known_clients_have_a_kind(name, arguments, kind):
    assert ToolUse.of(name, json.dumps(arguments)).kind is kind


def test_arguments_that_were_cut_off_still_name_their_command():
    whole = json.dumps({"command": "cd /a && pytest -q " + "x" * MAX_ARGUMENT_CHARS})
    assert ToolUse.of("Bash", whole[:200]).kind is ToolKind.TEST
    assert ToolUse.of("Bash", '{"comm').kind is ToolKind.OTHER


def test_names_are_cut_to_harmless_characters_and_labels_tell_name_and_kind():
    use = ToolUse.of('evil"\n{name}' * 40)
    assert len(use.name) == 48
    assert not set(use.name) & set('"\n{}')
    assert ToolUse.of("", "").name == "unnamed"
    assert ToolUse.of("Bash", '{"command": "git log"}').label == "Bash:vcs"


def test_a_kind_told_by_a_newer_process_is_other():
    assert ToolUse.told("Bash", "test") == ToolUse("Bash", ToolKind.TEST)
    assert ToolUse.told("Bash", "teleport") == ToolUse("Bash", ToolKind.OTHER)
