"""The ``coda`` command: a group whose subcommands are imported only when they are used."""

import sys
from importlib import import_module
from importlib.metadata import version as distribution_version

import click

from coda_cli.errors import CliError
from coda_engine.contract.errors import ContractError

_COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("coda_cli.up.command:up", "Run a CodaCluster on this machine: engines and a router, as processes."),
    "down": ("coda_cli.up.command:down", "End what coda up runs."),
    "status": ("coda_cli.up.command:status", "List what coda up runs on this machine."),
    "router": ("coda_cli.router_command:router", "Run one router in front of running engines."),
    "profile": ("coda_cli.profile_command:profile", "Measure an engine's profile, or show one."),
    "model": ("coda_cli.model.command:model", "Make a built-in model and print its folder."),
    "demo": ("coda_cli.demo.command:demo", "See it work: a small model, two coding agents, every decision explained."),
    "bench": ("coda_cli.bench_command:bench", "Run the benchmarks."),
    "validate": ("coda_cli.validate_command:validate", "Check a CodaCluster file without starting anything."),
    "version": ("coda_cli.main:version", "Print the version."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and help, and imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command called ``cmd_name``, importing its module now."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the table above is ours
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def coda() -> None:
    """Coda: vLLM on Kubernetes for coding agents, and the same on one machine."""


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(distribution_version("coda-serving"))


def main() -> None:
    """Run the command line; a mistake of the user ends with a message and exit code 2, never a stack trace."""
    try:
        coda(prog_name="coda")
    except (CliError, ContractError) as error:
        click.echo(f"coda: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
