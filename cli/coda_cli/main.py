"""The ``coda`` command: a group whose subcommands are imported only when they are used."""

import sys

import click

from coda_cli.errors import CliError
from coda_cli.lazy_group import LazyGroup
from coda_engine.contract.errors import ContractError

_COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("coda_cli.up.command:up", "Run a CodaCluster on this machine: engines and a router, as processes."),
    "down": ("coda_cli.up.command:down", "End what coda up runs."),
    "status": ("coda_cli.up.command:status", "List what coda up runs on this machine."),
    "router": ("coda_cli.router_command:router", "Run one router in front of running engines."),
    "key": ("coda_cli.key_command:key", "Make an API key and its document."),
    "profile": ("coda_cli.profile_command:profile", "Measure an engine's profile, or show one."),
    "model": ("coda_cli.model.command:model", "Make a built-in model and print its folder."),
    "demo": ("coda_cli.demo.command:demo", "See it work: a small model, two coding agents, every decision explained."),
    "bench": ("coda_cli.bench_command:bench", "Run the benchmarks."),
    "validate": ("coda_cli.validate_command:validate", "Check a CodaCluster file without starting anything."),
}


coda = LazyGroup(
    _COMMANDS,
    name="coda",
    help="Coda: vLLM on Kubernetes for coding agents, and the same on one machine.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(package_name="coda-serving", message="coda %(version)s")(coda)


def main() -> None:
    """Run the command line; a mistake of the user ends with a message and exit code 2, never a stack trace."""
    try:
        coda(prog_name="coda")
    except (CliError, ContractError, OSError, UnicodeDecodeError) as error:
        # The last two: a folder that may not be written, a full disk, a file that is no text.
        click.echo(f"coda: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
