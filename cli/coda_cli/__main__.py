"""``python -m coda_cli`` is the ``coda`` command."""

from coda_cli.main import main

if __name__ == "__main__":
    main()
