"""``python -m coda_operator.profile_job [options] -- ENGINE...``: what the profiling Job runs in its pod.

Starts the engine, measures it, writes the CodaProfile with the Job's own service account, ends. The last
words of a failure go where Kubernetes keeps a container's, and from there into the condition Profiled.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from coda_engine.contract.profile import Profile
from coda_engine.profiling import FULL, QUICK, EngineClient, ProfilingError, measure_profile
from coda_operator.errors import JobError
from coda_operator.in_cluster import apply_object
from coda_operator.profile_object import profile_object
from coda_operator.running_engine import running_engine

_TERMINATION_LOG = Path("/dev/termination-log")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The Job's command line.

    Attributes:
        namespace: Where the CodaProfile goes.
        owner: Owner reference of the CodaCluster.
        engine_url: Base URL at which the engine will answer.
        internal_token_file: Token of the engine's internal endpoints; None where they are open.
        startup_timeout_s: Time that the engine may take until it answers, seconds.
        quick: Measure fewer points.
        engine_argv: The engine's command line.
    """

    namespace: str
    owner: dict[str, Any]
    engine_url: str
    internal_token_file: Path | None
    startup_timeout_s: float
    quick: bool
    engine_argv: tuple[str, ...]


def parse_options(arguments: Sequence[str]) -> JobOptions:
    """Return the options in a command line; prints help and exits on a mistake."""
    parser = argparse.ArgumentParser(prog="python -m coda_operator.profile_job", description=__doc__)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--owner", required=True, type=json.loads, help="owner reference, JSON")
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--internal-token-file", type=Path)
    parser.add_argument("--startup-timeout-seconds", type=float, default=1200)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("engine", nargs="+", help="the engine's command line, after --")
    options = parser.parse_args(arguments)
    return JobOptions(
        namespace=options.namespace,
        owner=options.owner,
        engine_url=options.engine_url,
        internal_token_file=options.internal_token_file,
        startup_timeout_s=options.startup_timeout_seconds,
        quick=options.quick,
        engine_argv=tuple(options.engine),
    )


def run(options: JobOptions, write: Callable[[dict[str, Any]], None], say: Callable[[str], None]) -> Profile:
    """Measure and write; returns what was measured.

    Args:
        options: The command line.
        write: Makes the object exist in the Kubernetes cluster.
        say: Gets progress, a line at a time.

    Raises:
        JobError: The engine does not start, cannot be measured, or the profile cannot be written.
    """
    with running_engine(options.engine_argv) as engine:
        say(f"waiting for the engine, at most {options.startup_timeout_s:.0f} s")
        engine.wait_until_healthy(options.engine_url, options.startup_timeout_s)
        token = _token(options.internal_token_file)
        try:
            profile = measure_profile(
                EngineClient(options.engine_url, token), effort=QUICK if options.quick else FULL, progress=say
            )
        except ProfilingError as error:
            raise JobError(f"the engine could not be measured: {error}{engine.complaint()}") from error
    item = profile_object(profile, options.namespace, options.owner)
    write(item)
    say(f"wrote CodaProfile {item['metadata']['name']}, digest {profile.digest()}")
    return profile


def _token(file: Path | None) -> str | None:
    try:
        return file.read_text().strip() if file is not None else None
    except OSError as error:
        raise JobError(f"--internal-token-file {file}: cannot be read: {error.strerror}") from error


def _end_on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    raise JobError("stopped by Kubernetes (SIGTERM)")


def main() -> int:
    """Run the Job; returns the exit status."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    try:
        run(options, apply_object, say=lambda line: print(f"profile: {line}", flush=True))
    except JobError as error:
        print(f"profile: {error}", file=sys.stderr, flush=True)
        if _TERMINATION_LOG.exists():
            _TERMINATION_LOG.write_text(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
