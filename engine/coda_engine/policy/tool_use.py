"""Which kind of tool a reply calls: the tool's name and, for a shell, a coarse class of its command.

The kind is all that leaves this module; arguments are looked at and forgotten. What cannot be told is OTHER.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

MAX_ARGUMENT_CHARS = 4_096
"""As much of a call's arguments as anybody needs to collect."""

_MAX_NAME_CHARS = 48
_MAX_COMMANDS = 16
_MAX_WRAPPERS = 8


class ToolKind(StrEnum):
    """What a tool does, as far as it says how long it may take. Shell commands: slowest last within a line."""

    READ = "read"
    PLAN = "plan"
    SEARCH = "search"
    EDIT = "edit"
    VCS = "vcs"
    NETWORK = "network"
    RUN = "run"
    TEST = "test"
    INSTALL = "install"
    BUILD = "build"
    AGENT = "agent"
    ASK = "ask"
    OTHER = "other"


_SLOWEST_LAST = tuple(ToolKind)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One call of a tool, without its arguments.

    Attributes:
        name: The tool's name, cut to 48 harmless characters.
        kind: What it does.
    """

    name: str
    kind: ToolKind = ToolKind.OTHER

    @classmethod
    def of(cls, name: str, arguments: str = "") -> "ToolUse":
        """Return the use that a call's name and JSON arguments (whole or cut off) describe."""
        own_name = re.split(r"__|\.", name.lower())[-1]
        kind = shell_kind(_command(arguments)) if own_name in _SHELLS else _KINDS.get(own_name, ToolKind.OTHER)
        return cls(harmless(name), kind)

    @classmethod
    def told(cls, name: str, kind: str) -> "ToolUse":
        """Return the use that another process tells of; an unknown kind is OTHER."""
        return cls(harmless(name), ToolKind(kind) if kind in _KIND_VALUES else ToolKind.OTHER)

    @property
    def label(self) -> str:
        """``name:kind``, for people and for what is learnt of each."""
        return f"{self.name}:{self.kind.value}"


def harmless(name: str) -> str:
    """Return ``name`` without characters that a log or a label could stumble over, at most 48 of them."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", name[:_MAX_NAME_CHARS]) or "unnamed"


def shell_kind(command: str) -> ToolKind:
    """Return the kind of a shell line: of its commands, the one that takes longest; OTHER when none is known."""
    segments = re.split(r"&&|\|\||[;|\n&]", command[:MAX_ARGUMENT_CHARS])[:_MAX_COMMANDS]
    known = [kind for segment in segments if (kind := _command_kind(segment.split())) is not None]
    return max(known, key=_SLOWEST_LAST.index, default=ToolKind.OTHER)


def _command(arguments: str) -> str:
    """Return the shell line in a call's arguments: a string, or an argv list; "" when there is none."""
    try:
        fields = json.loads(arguments)
    except ValueError:
        cut_off = re.search(r'"(?:command|cmd|script)"\s*:\s*\[?\s*"((?:[^"\\]|\\.)*)', arguments)
        return cut_off.group(1).replace("\\n", "\n").replace('\\"', '"') if cut_off else ""
    if not isinstance(fields, dict):
        return ""
    value = next((fields[name] for name in ("command", "cmd", "script") if name in fields), "")
    if isinstance(value, list):
        return " ".join(str(part) for part in value)
    return value if isinstance(value, str) else ""


def _command_kind(words: list[str]) -> ToolKind | None:
    """Return one simple command's kind; None when its words say nothing."""
    for _ in range(_MAX_WRAPPERS):
        words = _without_assignments(words)
        if not words:
            return None
        program = PurePosixPath(words[0].strip("'\"(){}`")).name.lower()
        rest = words[1:]
        if program in _SHELL_PROGRAMS and any(word.startswith("-") and word.endswith("c") for word in rest[:2]):
            words = [word.strip("'\"") for word in rest if not word.startswith("-")]
        elif program in _WRAPPERS or (program in _RUNNERS and rest[:1] in (["run"], ["exec"])):
            words = _unwrapped(program, rest)
        else:
            return _program_kind(program, rest)
    return None


def _without_assignments(words: list[str]) -> list[str]:
    start = 0
    while start < len(words) and re.match(r"[A-Za-z_]\w*=", words[start]):
        start += 1
    return words[start:]


def _unwrapped(program: str, rest: list[str]) -> list[str]:
    if program in _RUNNERS:
        rest = rest[1:]
    start = 0
    while start < len(rest) and (rest[start].startswith("-") or re.fullmatch(r"\d+(\.\d+)?[smhd]?", rest[start])):
        start += 1
    return rest[start:]


def _program_kind(program: str, rest: list[str]) -> ToolKind | None:
    first = next((word.strip("'\"") for word in rest if not word.startswith("-")), "")
    if program.startswith("python") and "-m" in rest[:3]:
        module = rest[rest.index("-m") + 1 : rest.index("-m") + 2]
        return _PROGRAMS.get(module[0], ToolKind.RUN) if module else ToolKind.RUN
    if program in _BY_SUBCOMMAND:
        if first == "run":
            following = [word for word in rest if not word.startswith("-")][1:2]
            first = following[0].partition(":")[0] if following else first
        return _SUBCOMMANDS.get(first, _BY_SUBCOMMAND[program])
    is_script = program.startswith(("python", "pypy")) or program.endswith((".py", ".sh", ".js", ".ts", ".rb", ".pl"))
    return ToolKind.RUN if is_script else _PROGRAMS.get(program)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _table(kinds: dict[ToolKind, str]) -> dict[str, ToolKind]:
    return {name: kind for kind, names in kinds.items() for name in names.split()}


_KIND_VALUES = frozenset(kind.value for kind in ToolKind)

_SHELLS = _words(
    "bash shell sh execute execute_command run_command run_shell_command run_terminal_cmd run_in_terminal terminal "
    "exec exec_command shell_command local_shell execute_bash powershell"
)

_KINDS = _table(
    {
        ToolKind.READ: "read read_file view view_file open_file cat view_image notebookread bashoutput",
        ToolKind.EDIT: "edit multiedit write write_file edit_file create_file apply_patch patch notebookedit "
        "str_replace_editor str_replace_based_edit_tool write_to_file replace_in_file search_replace",
        ToolKind.SEARCH: "grep glob ls list list_dir list_files search search_files grep_search file_search "
        "codebase_search find",
        ToolKind.NETWORK: "webfetch websearch web_search web_fetch fetch browser browser_action",
        ToolKind.AGENT: "task agent spawn_agent new_task wait wait_agent collab_spawn",
        ToolKind.PLAN: "todowrite todoread update_plan think skill kill_shell killshell",
        ToolKind.ASK: "askuserquestion exitplanmode request_user_input ask_followup_question attempt_completion "
        "question finish submit",
    }
)

_SHELL_PROGRAMS = _words("bash sh zsh dash ksh fish")
_WRAPPERS = _words("sudo env time nohup nice exec command stdbuf timeout xargs then do else npx bunx uvx")
_RUNNERS = _words("uv poetry pipenv hatch pdm bundle pixi")

_PROGRAMS = _table(
    {
        ToolKind.READ: "cat head tail less more ls sed awk gawk wc tree stat file nl pwd du df diff jq bat xxd od sort "
        "uniq cut ps env printenv date",
        ToolKind.SEARCH: "grep egrep fgrep rg ag ack find fd locate which whereis",
        ToolKind.EDIT: "cp mv rm mkdir rmdir touch chmod chown ln tee patch unzip tar",
        ToolKind.VCS: "git gh glab hg svn jj",
        ToolKind.NETWORK: "curl wget ssh scp rsync ping nc kubectl helm aws gcloud az",
        ToolKind.RUN: "node ruby perl php java deno rscript psql mysql sqlite3 redis-cli bash sh ruff black mypy "
        "eslint prettier docker-compose sleep",
        ToolKind.TEST: "pytest py.test tox nox jest vitest mocha ctest rspec phpunit unittest playwright cypress "
        "nosetests bats gotestsum",
        ToolKind.BUILD: "cmake ninja gcc g++ clang clang++ cc c++ rustc javac tsc webpack vite esbuild rollup bazel "
        "meson msbuild xcodebuild build",
        ToolKind.INSTALL: "pip pip3 apt apt-get brew conda mamba micromamba yum dnf apk gem composer",
    }
)

_BY_SUBCOMMAND = {
    "make": ToolKind.BUILD, "just": ToolKind.BUILD, "mvn": ToolKind.BUILD, "gradle": ToolKind.BUILD,
    "gradlew": ToolKind.BUILD, "cargo": ToolKind.BUILD, "go": ToolKind.BUILD, "dotnet": ToolKind.BUILD,
    "docker": ToolKind.RUN, "podman": ToolKind.RUN, "npm": ToolKind.RUN, "pnpm": ToolKind.RUN,
    "yarn": ToolKind.INSTALL, "bun": ToolKind.RUN, "uv": ToolKind.INSTALL, "poetry": ToolKind.INSTALL,
    "bundle": ToolKind.INSTALL, "pdm": ToolKind.INSTALL, "pixi": ToolKind.INSTALL,
}  # fmt: skip

_SUBCOMMANDS = _table(
    {
        ToolKind.TEST: "test tests check t vitest jest pytest e2e verify",
        ToolKind.BUILD: "build compile package all bundle clippy vet",
        ToolKind.INSTALL: "install add ci i sync get restore update upgrade",
        ToolKind.NETWORK: "pull push",
        ToolKind.RUN: "run start dev exec lint format fmt",
        ToolKind.READ: "logs ps list ls view version",
    }
)
