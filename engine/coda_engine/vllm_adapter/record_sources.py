"""Writes ``known_sources.py`` for the installed vLLM: run after the features were tested on a new version.

``python -m coda_engine.vllm_adapter.record_sources`` adds the installed version's digests to those known.
"""

from pathlib import Path

from coda_engine.vllm_adapter.compat import TOUCHED, TOUCHED_BY_REPLIES, resolve_target, source_digest
from coda_engine.vllm_adapter.known_sources import SOURCES

_HEADER = '''"""Source digests of the vLLM functions that features rely on (see ``compat``); see ``record_sources``."""

# fmt: off
SOURCES: dict[str, tuple[str, ...]] = {
'''


def main() -> None:
    """Add the installed vLLM's digests to the known ones."""
    targets = sorted({target for group in TOUCHED.values() for target in group} | set(TOUCHED_BY_REPLIES))
    lines = []
    for target in targets:
        digests = sorted({*SOURCES.get(target, ()), source_digest(resolve_target(target))})
        listed = ", ".join(f'"{digest}"' for digest in digests)
        lines.append(f'    "{target}": (\n        {listed},\n    ),\n')
    path = Path(__file__).with_name("known_sources.py")
    path.write_text(_HEADER + "".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
