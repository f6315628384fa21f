"""The ``coda`` command: calls the components, runs them all on one machine, makes the built-in model, shows a demo."""
