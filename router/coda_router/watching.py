"""Notices that files changed, also when a ConfigMap or Secret mount swaps its symbolic links."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

POLL_INTERVAL_S = 1.0
"""Time between two looks at watched files."""

_log = logging.getLogger("coda.router.files")


def fingerprint(path: Path) -> tuple[object, ...]:
    """Return a value that changes when the file, or any file directly in the folder, changes."""
    try:
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(item.name, item.stat()) for item in paths]
    except OSError:
        return ()
    return tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in stats)


async def watch(
    path: Path, seen: tuple[object, ...], reload: Callable[[], None], on_refused: Callable[[], None]
) -> None:
    """Call ``reload`` after each change of ``path``.

    What it raises is logged once and told to ``on_refused``; what was in force stays in force.

    Args:
        path: File or folder.
        seen: Its :func:`fingerprint` from before what is in force was read, so that no change after that is missed.
        reload: Reads it again.
        on_refused: Called when ``reload`` has raised.
    """
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        current = fingerprint(path)
        if current == seen:
            continue
        seen = current
        try:
            reload()
        except Exception as error:  # what was in force stays in force, whatever is wrong with the new content
            _log.error("%s changed but is not taken: %s", path, error)
            on_refused()
