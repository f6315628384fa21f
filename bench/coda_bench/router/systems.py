"""What is compared: requests straight to the workers, this router, and peers that are installed."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class System:
    """One system under load.

    Attributes:
        name: As rows name it.
        command: Returns its command line, given its port, a second port for it, and the workers' URLs; None for
            requests straight to the workers.
    """

    name: str
    command: Callable[[int, int, Sequence[str]], list[str]] | None


DIRECT = System("direct", None)


def coda() -> System:
    """Return this router."""
    return System(
        "coda",
        lambda port, _, workers: [
            sys.executable, "-m", "coda_router", "--port", str(port), "--log-level", "warning", "--workers", *workers,
        ],
    )  # fmt: skip


def vllm_router(binary: str | None) -> System | None:
    """Return vllm-router 0.1.17 (consistent hash over sessions), if its binary is given or on the PATH."""
    found = binary or shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if found is None:
        return None

    def command(port: int, metrics_port: int, workers: Sequence[str]) -> list[str]:
        return [
            found, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers, "--policy", "consistent_hash",
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
            "--log-level", "warning", "--max-payload-size", str(64 * 2**20),
        ]  # fmt: skip

    return System("vllm-router", command)
