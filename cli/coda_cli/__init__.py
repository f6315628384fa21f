"""The ``coda`` command: thin; each subcommand calls a component."""
