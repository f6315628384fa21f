"""Errors of the command line.

::

    CliError               one or more clear lines for a person; exit code 2, never a stack trace
    ├── PreflightError     the machine or the file cannot run this; every problem found, one a line
    ├── ModelError         a built-in model that cannot be made
    └── StackError         a process of the stack that does not come up, or does not stay up
"""


class CliError(Exception):
    """Base of every error that a command ends with; the message names the field or thing and the remedy."""


class PreflightError(CliError):
    """What is asked for cannot run here; the message has one line for each problem."""


class ModelError(CliError):
    """A built-in model cannot be made: a missing package, a full disk, a damaged download."""


class StackError(CliError):
    """A process that should serve does not come up."""
