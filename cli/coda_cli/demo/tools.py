"""The agents' tools: real ones, in a scratch folder, and harmless whatever the model writes.

What is executed or overwritten is chosen by the model from fixed lists (its output is constrained to the tool's
schema, and the lists are enforced here again); only the text of a note is its own.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ERROR_PREFIX = "error: "
"""How a tool's output begins when it could not do what was asked."""

_SNIPPETS = (
    "import basket; print(basket.total([3, 4, 5]))",
    "import basket; print(basket.discounted(200, 10))",
    "print(open('prices.csv').read().count(','))",
)
_NOTE_FILES = ("notes.md", "review.md")
_NOTE_CHARS = 120
_RUN_LIMIT_S = 20.0

_FILES: Mapping[str, str] = {
    "basket.py": '''"""What is in a customer's basket, and what it costs."""


def total(prices):
    """Return the sum of the prices."""
    result = 0
    for price in prices:
        result += price
    return result


def discounted(amount, percent):
    """Return the amount after a discount of some percent."""
    return amount - amount * percent / 100
''',
    "prices.csv": "item,price\napple,3\nbread,4\ncheese,5\n",
    "README.md": "# Basket\n\nA small shop. `basket.py` adds up prices; `prices.csv` has them.\n",
}


class Workbench:
    """A scratch folder and the four tools that work in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, content in _FILES.items():
            (folder / name).write_text(content, encoding="utf-8")

    def run(self, name: str, arguments: str) -> str:
        """Return what a tool call gives: its output, or an error in words as a model may get it."""
        try:
            values: dict[str, Any] = json.loads(arguments or "{}")
            match name:
                case "list_files":
                    return "\n".join(sorted(path.name for path in self._folder.iterdir() if path.is_file()))
                case "read_file":
                    return (self._folder / _one_of(values["path"], _FILES)).read_text(encoding="utf-8")
                case "write_file":
                    return self._write(_one_of(values["path"], _NOTE_FILES), str(values["content"]))
                case "run_python":
                    return self._python(_one_of(values["code"], _SNIPPETS))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{ERROR_PREFIX}{error}"
        return f"{ERROR_PREFIX}there is no tool {name}"

    def _write(self, name: str, content: str) -> str:
        (self._folder / name).write_text(content[:_NOTE_CHARS], encoding="utf-8")
        return f"wrote {len(content[:_NOTE_CHARS])} characters to {name}"

    def _python(self, code: str) -> str:
        # -I leaves out the folder itself, so it is put back for `import basket`.
        command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.'); {code}"]
        try:
            done = subprocess.run(
                command, cwd=self._folder, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{ERROR_PREFIX}still running after {_RUN_LIMIT_S:.0f} s"
        return done.stdout.strip() or done.stderr.strip()


def definitions() -> list[dict[str, Any]]:
    """Return the tools as a request names them; ``strict`` holds the model to each schema."""
    return [
        _tool("list_files", "List the files of the project.", {}),
        _tool("read_file", "Read one file.", {"path": {"type": "string", "enum": list(_FILES)}}),
        _tool(
            "write_file",
            "Write a short note.",
            {
                "path": {"type": "string", "enum": list(_NOTE_FILES)},
                "content": {"type": "string", "maxLength": _NOTE_CHARS},
            },
        ),
        _tool("run_python", "Run a line of Python.", {"code": {"type": "string", "enum": list(_SNIPPETS)}}),
    ]


def _tool(name: str, description: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "strict": True, "parameters": parameters},
    }


def _one_of(value: object, allowed: Sequence[str] | Mapping[str, str]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
    return str(value)
