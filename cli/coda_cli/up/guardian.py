"""The guardian: a small process that outlives a ``coda up`` that was killed, and ends what it had started.

``python -m coda_cli.up.guardian STATE_DIR`` with a pipe as standard input. ``coda up`` writes a line into the pipe
before it ends by itself; without that line, the pipe's end means that it was killed.
"""

import signal
import sys
from pathlib import Path

from coda_cli.up.leftovers import end_run
from coda_cli.up.run_record import StateDir

FAREWELL = b"ended\n"


def main(state_dir: str) -> None:
    """Wait for ``coda up`` to end; clean up after it unless it said goodbye."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if FAREWELL in sys.stdin.buffer.read():
        return
    state = StateDir(Path(state_dir))
    with state.lock(wait=True):
        record = state.read()
        if record is not None:
            end_run(record, grace_s=3.0)
            state.forget()


if __name__ == "__main__":
    main(sys.argv[1])
