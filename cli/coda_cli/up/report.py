"""The lines in which ``coda up`` says what happens."""

import time
from collections.abc import Callable

import click

Report = Callable[[str], None]
"""Takes one line for people."""


def timed_report() -> Report:
    """Return a report that prints each line with the time since now."""
    started_s = time.monotonic()

    def report(line: str) -> None:
        click.echo(f"[{time.monotonic() - started_s:6.1f} s] {line}")

    return report
