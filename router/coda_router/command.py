"""``coda router`` and ``python -m coda_router``: the options, and errors as one line."""

import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from coda_router.config import RouterConfig, new_router_id, read_secret_file
from coda_router.edge.events import KEEP_ALIVE_S
from coda_router.errors import ConfigurationError
from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.endpoints import KubernetesService
from coda_router.fleet.guard import SILENCE_LIMIT_S
from coda_router.holding import HoldingLimits
from coda_router.logs import set_up_logging
from coda_router.server import serve

MIN_SECRET_CHARS = 16
"""Shortest cluster secret that is accepted."""

_FILE = click.Path(path_type=Path)


class Seconds(click.FloatRange):
    """A bounded number of seconds; "nan" compares with no bound and is refused by itself."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds.

        Raises:
            click.BadParameter: Not a number within the bounds.
        """
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


@click.command("router", short_help="Place requests on engines and relay their replies.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65_535), help="Port; 0 = any free one.")
@click.option("--workers", "workers", multiple=True, metavar="URL...", help="Engines, each as http://HOST:PORT.")
@click.argument("more_workers", nargs=-1, metavar="")
@click.option("--discover", metavar="NAMESPACE/SERVICE", help="Find engines by a Kubernetes Service's endpoints.")
@click.option("--settings-file", type=_FILE, help="Settings document (JSON); read again when it changes.")
@click.option(
    "--api-keys-dir",
    type=_FILE,
    help="Folder of API keys: a file's name is the tenant, its content the key or a JSON document (see coda key); "
    "read again when it changes.",
)
@click.option("--cluster-secret-file", type=_FILE, help="Secret that signs identities for the engines.")
@click.option(
    "--internal-token-file",
    type=_FILE,
    help="Token of the internal endpoints (/coda/...); without it they are open on loopback and closed elsewhere.",
)
@click.option("--router-id", help="Name by which engines attribute requests; default: host name and a random part.")
@click.option(
    "--max-body-bytes",
    default=32 * 1024 * 1024,
    show_default=True,
    type=click.IntRange(1024),
    help="Largest request body.",
)
@click.option(
    "--max-sessions",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(1, 100_000_000),
    help="Most sessions whose engine is remembered, the latest ones; about 50 MB for a million.",
)
@click.option(
    "--max-held-requests",
    default=512,
    show_default=True,
    type=click.IntRange(0),
    help="Most requests held back while every engine has a full frontier of waiting ones.",
)
@click.option(
    "--max-held-seconds",
    default=60.0,
    show_default=True,
    type=Seconds(0.01, 86_400),
    help="Longest time to hold one back.",
)
@click.option(
    "--grace-seconds", default=30.0, show_default=True, type=Seconds(0, 86_400),
    help="Time that requests in flight get after SIGTERM.",
)  # fmt: skip
@click.option(
    "--decision-log",
    type=_FILE,
    help="File for a JSON line on each placement decision; a new one is begun at 64 MiB, the one before is kept.",
)
@click.option(
    "--keep-alive-seconds", default=KEEP_ALIVE_S, show_default=True, type=Seconds(0, 3600),
    help="Silence after which a stream says that it lives; 0 = never.",
)  # fmt: skip
@click.option(
    "--silence-seconds", default=SILENCE_LIMIT_S, show_default=True, type=Seconds(1, 86_400),
    help="Silence after which a request is taken from an engine that does not move on.",
)  # fmt: skip
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def router(
    host: str,
    port: int,
    workers: Sequence[str],
    more_workers: Sequence[str],
    discover: str | None,
    settings_file: Path | None,
    api_keys_dir: Path | None,
    cluster_secret_file: Path | None,
    internal_token_file: Path | None,
    router_id: str | None,
    max_body_bytes: int,
    max_sessions: int,
    max_held_requests: int,
    max_held_seconds: float,
    grace_seconds: float,
    keep_alive_seconds: float,
    silence_seconds: float,
    decision_log: Path | None,
    log_level: str,
) -> None:
    """Place requests on engines and relay their replies.

    Engines are vLLM servers with Coda's plug-ins; plain ones work too, placed by what is in flight.
    """
    set_up_logging(log_level.upper())
    # uvicorn's own start and stop messages repeat the router's.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        serve(
            RouterConfig(
                host=host,
                port=port,
                workers=tuple(WorkerAddress.parse(url) for url in (*workers, *more_workers)),
                discovery=KubernetesService.parse(discover, os.environ) if discover else None,
                settings_file=settings_file,
                api_keys_dir=api_keys_dir,
                cluster_secret=_secret(cluster_secret_file),
                internal_token=(
                    read_secret_file(internal_token_file, "--internal-token-file") if internal_token_file else None
                ),
                decision_log=decision_log,
                max_body_bytes=max_body_bytes,
                max_sessions=max_sessions,
                grace_s=grace_seconds,
                keep_alive_s=keep_alive_seconds,
                silence_limit_s=silence_seconds,
                holding=HoldingLimits(max_requests=max_held_requests, max_wait_s=max_held_seconds),
                router_id=router_id or new_router_id(),
            )
        )
    except ConfigurationError as error:
        click.echo(f"coda router: {error}", err=True)
        sys.exit(2)


def _secret(path: Path | None) -> bytes | None:
    if path is None:
        return None
    secret = read_secret_file(path, "--cluster-secret-file")
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigurationError(f"--cluster-secret-file {path}: give at least {MIN_SECRET_CHARS} characters")
    return secret.encode()
