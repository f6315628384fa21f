"""``coda validate``: checks a CodaCluster file without starting anything."""

from pathlib import Path

import click

from coda_cli.errors import PreflightError
from coda_cli.up.cluster_file import read_cluster_file
from coda_cli.up.layout import shadow_folder
from coda_cli.up.machine import look_at_machine
from coda_cli.up.preflight import check


@click.command()
@click.option(
    "-f", "--file", "file", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to check."
)
@click.option("--here", is_flag=True, help="Check as well whether it can run on this machine (coda up).")
def validate(file: Path, here: bool) -> None:
    """Check a CodaCluster file: every field, its type and limits."""
    cluster = read_cluster_file(file)
    if here:
        port = cluster.spec.router.port
        findings = check(cluster.spec, look_at_machine(cluster.spec, port, shadow_folder(cluster.name)), port)
        if findings.problems:
            raise PreflightError("\n".join(f"{file}: {problem}" for problem in findings.problems))
        for note in findings.notes:
            click.echo(f"note: {note}", err=True)
    click.echo(f"{file}: CodaCluster {cluster.name} is valid")
