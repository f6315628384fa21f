"""``coda demo``: starts the stack from the example, lets two agents work, shows what was decided, ends it all."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from coda_cli.demo.scenario import play
from coda_cli.demo.view import View
from coda_cli.errors import CliError, StackError
from coda_cli.up.cluster_file import read_cluster_file
from coda_cli.up.command import SERVING
from coda_cli.up.machine import LOOPBACK, free_ports
from coda_cli.up.run_record import StateDir, state_root
from coda_engine.profiling import EngineClient, ProcessClient

_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "smollm2-cpu.yaml"
_POLL_S = 0.2
_END_WAIT_S = 15.0


@click.command()
@click.option(
    "-f",
    "--file",
    "file",
    default=_EXAMPLE,
    type=click.Path(dir_okay=False, path_type=Path),
    help="CodaCluster to show; default: the example with the built-in model.",
)
@click.option("--port", type=click.IntRange(1, 65_535), help="Port of the router; default: the first free one.")
@click.option("--keep", is_flag=True, envvar="KEEP", help="Leave it running (KEEP=1 does the same).")
def demo(file: Path, port: int | None, keep: bool) -> None:
    """Start a small model with one engine and one router, and let two coding agents work with it."""
    signal.signal(signal.SIGTERM, _interrupt)
    cluster = read_cluster_file(file)
    free_port = next(iter(free_ports(cluster.spec.router.port, 1)), None)
    if port is None and free_port is None:
        raise CliError("--port: no port is free above the file's; name one")
    state = StateDir(state_root(os.environ) / cluster.name)
    with state.lock(wait=False) as is_free:
        if not is_free:
            raise CliError(f"{cluster.name} runs here already; end it first: coda down {cluster.name}")
    scratch_dir = tempfile.TemporaryDirectory(prefix="coda-demo-")
    with _stack(file, port or free_port or 0, state, keep) as url, scratch_dir as scratch:
        record = state.read()
        if record is None:
            raise StackError("the stack ended at once; see the lines above")
        token = record.internal_token_file.read_text(encoding="ascii")
        engine, router = EngineClient(record.engine_urls[0], token), ProcessClient(url, token)
        play(url, engine, router, cluster.spec.model.name, Path(scratch), View())
        if keep:
            _say_how_to_go_on(url, cluster.spec.model.name, cluster.name)


@contextmanager
def _stack(file: Path, port: int, state: StateDir, keep: bool) -> Iterator[str]:
    """Run ``coda up`` beside the demo and yield the router's URL once it serves; end it unless it is to be kept."""
    log_file = state.logs / "up.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://{LOOPBACK}:{port}"
    command = [sys.executable, "-m", "coda_cli", "up", "-f", str(file), "--port", str(port)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command if keep else [*command, "--stop-with-stdin"],
            stdin=subprocess.DEVNULL if keep else subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    kept = False
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(log_file, ended), daemon=True)
    follower.start()
    try:
        _wait_until_served(process, log_file)
        yield url
        kept = keep
    finally:
        if not kept:
            _end(process)
        ended.set()
        follower.join()


def _wait_until_served(process: "subprocess.Popen[bytes]", log_file: Path) -> None:
    while process.poll() is None:
        if SERVING in log_file.read_text(encoding="utf-8", errors="replace"):
            time.sleep(2 * _POLL_S)  # the follower prints the line first
            return
        time.sleep(_POLL_S)
    raise StackError("the stack did not come up; see the lines above")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its guardian cleans up
        process.wait()


def _follow(log_file: Path, ended: threading.Event) -> None:
    """Print the stack's lines as they come, until it has ended and all are printed."""
    with log_file.open(encoding="utf-8", errors="replace") as log:
        while True:
            last_time = ended.is_set()
            while line := log.readline():
                click.echo(f"  {line}", nl=False)
            if last_time:
                return
            ended.wait(_POLL_S)


def _say_how_to_go_on(url: str, model: str, name: str) -> None:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    click.echo(
        f"\nIt is left running (KEEP). Talk to it:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"End it:\n  {Path(sys.executable).parent / 'coda'} down {name}"
    )


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
