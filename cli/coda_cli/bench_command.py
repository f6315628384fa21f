"""``coda bench``: the benchmarks, each a command of the package ``coda_bench`` (folder ``bench/`` of a checkout)."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from coda_cli.errors import CliError

_BENCHMARKS: dict[str, tuple[str, str]] = {
    "engine": ("coda_bench.engine.command:engine", "The engine's decisions and their cost, against stock vLLM."),
    "router": ("coda_bench.router.command:router", "The router's data path: added latency, CPU, memory."),
}


class Benchmarks(click.Group):
    """A group whose members are imported when they are called; a checkout has them, an installed package has not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the benchmarks."""
        return list(_BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the benchmark called ``cmd_name``, importing its module now."""
        if cmd_name not in _BENCHMARKS:
            return None
        module, _, attribute = _BENCHMARKS[cmd_name][0].partition(":")
        _require_checkout()
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the table above is ours
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of benchmarks without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in _BENCHMARKS.items()])


@click.group(cls=Benchmarks)
def bench() -> None:
    """Run a benchmark; figures are one JSON object a line, with a table for people."""


def _require_checkout() -> None:
    if find_spec("coda_bench") is not None:
        return
    folder = Path(__file__).resolve().parents[2] / "bench"
    if not (folder / "coda_bench").is_dir():
        raise CliError("coda bench: the benchmarks are not part of the installed package; run it in a checkout")
    sys.path.insert(0, str(folder))
