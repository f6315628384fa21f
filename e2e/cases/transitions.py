"""What a person sees with ``kubectl get codacluster -w``: every change of a condition, recorded."""

import json
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kubectl import Kubectl


@dataclass(frozen=True)
class Transition:
    """One condition as it became.

    Attributes:
        at_s: Seconds since the recording began.
        condition: Its type.
        status: ``True`` or ``False``.
        reason: Its reason.
    """

    at_s: float
    condition: str
    status: str
    reason: str


class Recorder:
    """Watches one CodaCluster from a thread of its own."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        command = ["kubectl", "--namespace", kubectl.namespace, "get", "codacluster", name, "--watch"]
        command += ["-o", "json"]  # kubectl's jsonpath prints a range only once in a watch
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kubectl.env)
        self._started_s = time.monotonic()
        self._seen: dict[str, tuple[str, str]] = {}
        self._transitions: list[Transition] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        self._thread.join(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def transitions(self) -> list[Transition]:
        """Return what happened so far."""
        return [*self._transitions]

    def since(self, mark: int, condition: str) -> list[Transition]:
        """Return what happened to a condition after the first ``mark`` transitions."""
        return [item for item in self.transitions[mark:] if item.condition == condition]

    def __str__(self) -> str:
        return "\n".join(
            f"  {item.at_s:6.1f} s  {item.condition}={item.status} {item.reason}" for item in self.transitions
        )

    def _read(self) -> None:
        text: list[str] = []
        for line in self._process.stdout or ():
            text.append(line)
            if line.rstrip() == "}":  # the end of one object, as kubectl prints it
                self._see(json.loads("".join(text)))
                text.clear()

    def _see(self, cluster: dict[str, Any]) -> None:
        at_s = time.monotonic() - self._started_s
        for item in cluster.get("status", {}).get("conditions", []):
            now = (item["status"], item["reason"])
            if self._seen.get(item["type"]) != now:
                self._seen[item["type"]] = now
                self._transitions.append(Transition(at_s, item["type"], *now))
