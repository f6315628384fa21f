"""``coda model``: makes a built-in model and prints its folder."""

import os
from pathlib import Path

import click

from coda_cli.model.catalog import BUILTIN_MODELS, default_model_dir
from coda_cli.model.folder import ensure_model


@click.command()
@click.argument("name", type=click.Choice(sorted(BUILTIN_MODELS)))
@click.option(
    "--dir",
    "model_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that holds built-in models; the model becomes a folder in it. "
    "Default: $CODA_MODEL_DIR, else the user's cache.",
)
@click.option("--verify", is_flag=True, help="Compare the digest of every file of a finished folder.")
def model(name: str, model_dir: Path | None, verify: bool) -> None:
    """Make the built-in model NAME (once) and print its folder."""
    folder = ensure_model(
        BUILTIN_MODELS[name],
        model_dir or default_model_dir(os.environ),
        progress=lambda line: click.echo(line, err=True),
        verify=verify,
    )
    click.echo(folder)
