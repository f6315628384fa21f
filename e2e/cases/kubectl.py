"""kubectl as the cases use it: every call bounded, objects as plain data."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
POLL_S = 1.0


class Kubectl:
    """One namespace of one cluster."""

    def __init__(self, kubeconfig: Path, path: str, namespace: str) -> None:
        self.namespace = namespace
        self.env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path}

    def run(self, *arguments: str, given: str | None = None, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run ``kubectl ARGUMENTS`` in the namespace; the caller looks at the status."""
        command = ["kubectl", "--namespace", self.namespace, *arguments]
        return subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=timeout_s, env=self.env, check=False
        )

    def must(self, *arguments: str, given: str | None = None, timeout_s: float = 60) -> str:
        """Run ``kubectl ARGUMENTS`` and return its output; anything else fails the test."""
        done = self.run(*arguments, given=given, timeout_s=timeout_s)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, document: dict[str, Any]) -> str:
        """Apply an object."""
        return self.must("apply", "-f", "-", given=json.dumps(document))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object."""
        item: dict[str, Any] = json.loads(self.must("get", kind, name, "-o", "json"))
        return item

    def find(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the objects of some kinds."""
        found: list[dict[str, Any]] = json.loads(self.must("get", kinds, "-l", selector, "-o", "json"))["items"]
        return found

    def helm(self, *arguments: str, timeout_s: float = 180) -> str:
        """Run ``helm ARGUMENTS`` in the namespace and return its output."""
        command = ["helm", "--namespace", self.namespace, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=self.env, check=False)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    @contextmanager
    def forwarded(self, target: str, local_port: int, remote_port: int) -> Iterator[str]:
        """Yield the URL at which ``target`` answers on this machine."""
        ports = f"{local_port}:{remote_port}"
        command = ["kubectl", "--namespace", self.namespace, "port-forward", target, ports]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env)
        assert process.stdout is not None
        try:
            opening = process.stdout.readline()
            assert opening.startswith("Forwarding"), f"{' '.join(command)}: {opening}"
            yield f"http://127.0.0.1:{local_port}"
        finally:
            process.terminate()
            process.wait(timeout=10)
            process.stdout.close()


def wait_for(what: str, probe: Callable[[], T | None], timeout_s: float, state: Callable[[], str] = str) -> T:
    """Return the first truthy answer of ``probe``; fails after ``timeout_s`` and shows ``state``."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        answer = probe()
        if answer:
            return answer
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:.0f} s\n{state()}"
        time.sleep(POLL_S)
