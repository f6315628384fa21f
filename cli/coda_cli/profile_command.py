"""``coda profile``: measures a running engine, writes the artifact, shows one."""

from pathlib import Path

import click

from coda_cli.errors import CliError
from coda_cli.profile_file import profile_table, write_profile
from coda_engine.contract.profile import Profile
from coda_engine.profiling import EngineClient, ProfilingError, measure_profile


@click.group(invoke_without_command=True)
@click.option("--engine", "engine_url", metavar="URL", help="Base URL of a running engine that nobody else uses.")
@click.option("--out", "out_file", type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option("--quick", is_flag=True, help="About 12 s instead of minutes; sizes up to what 1.3 s prefill.")
@click.option("--apply", "apply_profile", is_flag=True, help="Hand the profile to the engine as well.")
@click.option("--internal-token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def profile(
    context: click.Context,
    engine_url: str | None,
    out_file: Path | None,
    quick: bool,
    apply_profile: bool,
    internal_token_file: Path | None,
) -> None:
    """Measure an engine's prefill cost and write it as a profile.

    Nothing is written when the measurement fails its own check.
    """
    if context.invoked_subcommand is not None:
        return
    if engine_url is None or not engine_url.startswith("http://"):
        raise CliError(f"--engine: needs the base URL of a running engine, http://HOST:PORT (given: {engine_url})")
    if out_file is None and not apply_profile:
        raise CliError("--out: name the file to write (or --apply to hand the profile to the engine only)")
    if out_file is not None and not out_file.absolute().parent.is_dir():
        raise CliError(f"--out {out_file}: its folder does not exist; make it first")
    token = internal_token_file.read_text(encoding="utf-8").strip() if internal_token_file else None
    client = EngineClient(engine_url.rstrip("/"), token)
    try:
        measured = measure_profile(client, quick=quick, progress=lambda line: click.echo(line, err=True))
        if apply_profile:
            client.put_profile(measured)
    except ProfilingError as error:
        raise CliError(f"--engine {engine_url}: {error}; nothing was written") from error
    if out_file is not None:
        write_profile(measured, out_file)
        click.echo(f"wrote {out_file}", err=True)
    click.echo(profile_table(measured))


@profile.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(file: Path) -> None:
    """Print the profile in FILE."""
    click.echo(profile_table(Profile.from_json(file.read_bytes())))
