"""``coda profile``: measures a running engine, writes the artifact, shows one."""

from pathlib import Path

import click

from coda_cli.errors import CliError
from coda_cli.profile_file import profile_table, read_profile, write_profile, write_report
from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.profile import Profile
from coda_engine.profiling import (
    FULL,
    QUICK,
    EngineClient,
    ProfilingError,
    measure_profile,
    needs_revalidation,
    revalidate,
    sample_file_path,
)

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@click.option("--engine", "engine_url", metavar="URL", help="Base URL of a running engine that nobody else uses.")
@click.option("--out", "out_file", type=_FILE, help="File to write.")
@click.option("--quick", is_flag=True, help="About 20 s instead of minutes; sizes up to what 0.9 s prefill.")
@click.option("--apply", "apply_profile", is_flag=True, help="Hand the profile to the engine as well, which goes on.")
@click.option(
    "--fresh", is_flag=True, help="Measure anew, even where --out only wants another look or was interrupted."
)
@click.option("--report", "report_file", type=_FILE, help="HTML page to write: points, fit, bounds, held-out errors.")
@click.option("--internal-token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def profile(
    context: click.Context,
    engine_url: str | None,
    out_file: Path | None,
    quick: bool,
    apply_profile: bool,
    fresh: bool,
    report_file: Path | None,
    internal_token_file: Path | None,
) -> None:
    """Measure what preparing a request costs an engine (prefill by context, restores) and write it as a profile.

    Nothing is written when the measurement fails its own check. An interrupted measurement goes on where it stopped.
    When --out holds a profile of this very engine under another driver or patch version, only its held-out points are
    looked at again, about 20 s.
    """
    if context.invoked_subcommand is not None:
        return
    client = _client(engine_url, internal_token_file)
    if out_file is None and not apply_profile:
        raise CliError("--out: name the file to write (or --apply to hand the profile to the engine only)")
    for option, file in (("--out", out_file), ("--report", report_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CliError(f"{option} {file}: its folder does not exist; make it first")
    try:
        measured = _measure(client, out_file, quick=quick, fresh=fresh)
        if apply_profile:
            client.put_profile(measured)
    except (ProfilingError, ProfileRefusedError) as error:
        raise CliError(f"--engine {engine_url}: {error}; nothing was written") from error
    if out_file is not None:
        write_profile(measured, out_file)
        _say(f"wrote {out_file}")
    if report_file is not None:
        write_report(measured, report_file)
        _say(f"wrote {report_file}")
    click.echo(profile_table(measured))


@profile.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--report", "report_file", type=_FILE, help="HTML page to write: points, fit, bounds, held-out errors.")
def show(file: Path, report_file: Path | None) -> None:
    """Print the profile in FILE."""
    stored = read_profile(file)
    click.echo(f"{file}:")
    click.echo(profile_table(stored))
    if report_file is not None:
        write_report(stored, report_file)
        _say(f"wrote {report_file}")


@profile.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--engine", "engine_url", metavar="URL", required=True, help="Base URL of a running engine.")
@click.option("--internal-token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def apply(file: Path, engine_url: str, internal_token_file: Path | None) -> None:
    """Hand the profile in FILE to a running engine, which goes on serving with it."""
    try:
        applied = _client(engine_url, internal_token_file).put_profile(read_profile(file))
    except (ProfilingError, ProfileRefusedError) as error:
        raise CliError(f"--engine {engine_url}: {error}") from error
    click.echo(f"profile {applied.digest} is in force on {engine_url}")
    if applied.outdated:
        _say(f"but {applied.outdated}")


def _client(engine_url: str | None, internal_token_file: Path | None) -> EngineClient:
    if engine_url is None or not engine_url.startswith("http://"):
        raise CliError(f"--engine: needs the base URL of a running engine, http://HOST:PORT (given: {engine_url})")
    token = internal_token_file.read_text(encoding="utf-8").strip() if internal_token_file else None
    return EngineClient(engine_url.rstrip("/"), token)


def _measure(client: EngineClient, out_file: Path | None, *, quick: bool, fresh: bool) -> Profile:
    """Return a profile of the engine: that in ``out_file`` looked at again where that is enough, else a new one."""
    samples_file = sample_file_path(out_file) if out_file is not None else None
    if fresh and samples_file is not None:
        samples_file.unlink(missing_ok=True)
    known = _known(out_file) if out_file is not None and not fresh else None
    if known is not None and known.provenance.quick is quick and needs_revalidation(known, client):
        changed = ", ".join(known.soft_mismatches(client.full_key()))
        _say(f"{out_file} is of this engine under other versions ({changed}): its held-out points are enough")
        return revalidate(known, client, progress=_say)
    return measure_profile(client, effort=QUICK if quick else FULL, progress=_say, samples_file=samples_file)


def _known(file: Path) -> Profile | None:
    """Return the profile that ``file`` holds; None when there is none that can be read: it will be written over."""
    try:
        return read_profile(file)
    except CliError:
        return None


def _say(line: str) -> None:
    click.echo(line, err=True)
