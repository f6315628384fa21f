"""Check what no linter knows: the repository's layout and what may not be written into it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
SOURCE_ROOTS = ("engine", "router", "operator", "bench", "cli")
MAX_MODULE_LINES = 330
# Every machine has /tmp: a clone right below it is known by its own name only.
PLACES = (str(ROOT if ROOT.parent == Path("/tmp") else ROOT.parent), f"{Path.home()}/")  # noqa: S108
LOCK_FILES = re.compile(r"(^|/)(uv|poetry|pdm|Pipfile)\.lock$")
HOST_OF_A_REGISTRY = re.compile(r"https?://[^\s\"']+(\.whl|\.crate|/simple/?$|/-/[^\s\"']+\.tgz|/@v/)")
EXTRAS_OF_AN_IMAGE = re.compile(r"requirements\.py pyproject\.toml ([a-z -]+) >")


def problems(files: list[str]) -> list[str]:
    """Return one message for each broken rule among the tracked files."""
    found = []
    for name in files:
        path = ROOT / name
        parts = Path(name).parts
        if len(parts) == 2 and parts[0] in SOURCE_ROOTS and parts[1] == "__init__.py":
            found.append(f"{name}: a source root is not a package (operator/ would shadow the standard library)")
        if LOCK_FILES.search(name):
            found.append(f"{name}: lock files name package hosts; pin in requirements/constraints.txt")
        if not path.is_file() or path.suffix in {".png", ".gz", ".sum"}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if any(place in text for place in PLACES):
            found.append(f"{name}: contains a path of one machine")
        if HOST_OF_A_REGISTRY.search(text) and name != "scripts/guard.py":
            found.append(f"{name}: contains a download address of a package registry")
        asked = set(" ".join(EXTRAS_OF_AN_IMAGE.findall(text)).split())
        found += [f"{name}: pyproject.toml has no extra {extra}" for extra in sorted(asked - set(EXTRAS))]
        lines = text.count("\n")
        if path.suffix == ".py" and "tests" not in parts and "e2e" not in parts and lines > MAX_MODULE_LINES:
            found.append(f"{name}: {lines} lines; split it where its second subject begins")
    names = [Path(name).name for name in files if Path(name).name.startswith("test_")]
    found += [f"{name}: two test files have this name" for name in sorted({n for n in names if names.count(n) > 1})]
    return found


def main() -> int:
    """Print every problem; return 1 if there is one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = problems(listed.split("\n")[:-1])
    print("\n".join(found) if found else "layout: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
