"""A command group whose members are imported only when they are called, so that ``coda --help`` is quick."""

from collections.abc import Mapping
from importlib import import_module

import click


class LazyGroup(click.Group):
    """A group that knows its commands' names and help, and imports a command when it is called.

    Args:
        targets: Name to (``module:attribute`` of a click command, one line about it), in the order of the help.
        attributes: click's own arguments of a group.
    """

    def __init__(self, targets: Mapping[str, tuple[str, str]], **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]
        self._targets = targets

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(self._targets)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command called ``cmd_name``, importing its module now."""
        if cmd_name not in self._targets:
            return None
        module, _, attribute = self._targets[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the tables are ours
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self._targets.items()])
