"""Run the project's suites and say at the end which ran, which failed and which tool was missing.

``make test`` runs all of them; ``python scripts/test.py check unit`` only those. A suite whose tools are
missing is skipped with the tool's name; with CODA_REQUIRE_ALL=1 (continuous integration) that is a failure.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PYTHON = str(ROOT / ".venv/bin/python")
LAB = str(ROOT / "e2e/lab/lab")

Command = tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Commands that belong together.

    Attributes:
        name: As given on the command line.
        purpose: What passing shows.
        commands: Run in order; the first failure ends the suite.
        missing: Returns the tool that the suite cannot run without, or None.
        cleanup: Always run afterwards.
        limit_s: The longest that one command may take, seconds.
        lanes: Commands that run at the same time.
    """

    name: str
    purpose: str
    commands: tuple[Command, ...]
    missing: Callable[[], str | None] = lambda: None
    cleanup: tuple[Command, ...] = ()
    limit_s: int = 1800
    lanes: int = 1


class Outcome(StrEnum):
    """How a suite ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Result:
    """A suite's outcome with its reason and duration."""

    suite: Suite
    outcome: Outcome
    detail: str
    wall_s: float


def main(names: Sequence[str]) -> int:
    """Run the named suites (all when none is named) and return the exit status."""
    suites = all_suites(long=os.environ.get("CODA_TEST_LONG") == "1")
    unknown = set(names) - {suite.name for suite in suites}
    if unknown:
        print(f"no such suite: {', '.join(sorted(unknown))}; there are: {', '.join(s.name for s in suites)}")
        return 2
    require_all = os.environ.get("CODA_REQUIRE_ALL") == "1"
    chosen = [suite for suite in suites if suite.name in names or not names]
    lab_build = start_lab_build() if any(suite.name == "cluster" for suite in chosen) else None
    results = []
    for suite in chosen:
        if suite.name == "cluster" and lab_build is not None:
            print("── waiting for the lab's binaries to be built", flush=True)
            lab_build.wait(timeout=1800)
        results.append(run(suite, require_all))
    report(results)
    return 1 if any(result.outcome is Outcome.FAILED for result in results) else 0


def all_suites(*, long: bool) -> list[Suite]:
    """Return every suite, in the order that finds faults soonest."""
    pytest = (PYTHON, "-m", "pytest", "-q", "--durations=5")
    side_by_side = (*pytest, "-n", "3", "--dist", "loadfile")
    bench = (PYTHON, "-m", "coda_cli", "bench")
    size = "--full" if long else "--quick"
    cases = ("--case", "m3,restore,idle,selection")
    # Whether everything runs is as plain with a shallow model, in a third of the time.
    shallow = () if long else ("--layers", "6")
    out = ROOT / "build/bench"
    return [
        Suite(
            "check",
            "format, lint, types, layers, generated files, layout",
            (
                (PYTHON, "-m", "ruff", "check", "."),
                (PYTHON, "-m", "ruff", "format", "--check", "--quiet", "."),
                (PYTHON, "-m", "mypy"),
                (str(ROOT / ".venv/bin/lint-imports"),),
                (PYTHON, "scripts/guard.py"),
                (PYTHON, "-m", "coda_operator.crd", "--check"),
                (PYTHON, "-m", "coda_engine.vllm_adapter.telemetry.guide", "--check"),
            ),
        ),
        Suite(
            "unit",
            "tests without vLLM or a cluster",
            # Side by side, file by file: most of their time is waiting for real time-outs.
            ((*side_by_side, "-m", "not vllm and not cluster and not gpu and not stress"),),
        ),
        Suite(
            "stress",
            "kills, flipped bits, faulty engines, hostile clients, random sequences",
            ((*side_by_side, "-m", "stress and not vllm and not cluster and not gpu"),),
        ),
        Suite(
            "stack",
            "coda model, up and profile on real vLLM, alone: they measure",
            ((*pytest, "-m", "vllm and not gpu", "cli/tests"),),
            missing_vllm,
        ),
        Suite(
            "vllm",
            "engine tests on real vLLM (CPU)",
            vllm_commands((*pytest, "-m", "vllm and not gpu")),
            missing_vllm,
            lanes=2,
        ),
        Suite(
            "bench",
            f"benchmarks run to their end ({size})",
            (
                (*bench, "engine", *cases, *shallow, size, "--fresh", "--out", str(out / "engine.jsonl")),
                (*bench, "router", size, "--out", str(out / "router.jsonl")),
            ),
            missing_vllm,
            limit_s=7200 if long else 1200,
        ),
        Suite(
            "cluster",
            "operator, chart and end-to-end cases on a real Kubernetes",
            (() if own_cluster() else ((LAB, "up"),))
            + ((*pytest, "-m", "cluster and not gpu", "operator/tests", "e2e/cases"),),
            missing_cluster,
            cleanup=() if own_cluster() else ((LAB, "down"),),
            limit_s=2400,
        ),
    ]


def vllm_commands(pytest: Command) -> tuple[Command, ...]:
    """Return the commands of the tests on real vLLM, the longest first.

    An engine inside a test process leaves its mark on that process: each file that has one gets a process of its own.
    """
    tests = ROOT / "engine/tests"
    alone = sorted(str(path.relative_to(ROOT)) for path in tests.glob("test_vllm_*_engine.py"))
    servers = sorted(str(path.relative_to(ROOT)) for path in tests.glob("test_vllm_*server.py"))
    others = tuple(f"--ignore={path}" for path in (*alone, *servers))
    return (
        (*pytest, *others, "engine/tests"),
        *((*pytest, path) for path in alone),
        (*pytest, *servers),
    )


def own_cluster() -> bool:
    """Return whether the person brought a cluster."""
    return bool(os.environ.get("KUBECONFIG"))


def missing_vllm() -> str | None:
    """Return what real engines lack on this machine."""
    found = subprocess.run([PYTHON, "-c", "import vllm"], capture_output=True, check=False, cwd=ROOT)
    return None if found.returncode == 0 else "vLLM (scripts/install)"


def missing_cluster() -> str | None:
    """Return what a cluster lacks: the lab needs root and Go, or a kubeconfig takes its place."""
    if own_cluster():
        return None if shutil.which("kubectl") else "kubectl"
    if os.geteuid() != 0:
        return "root (or KUBECONFIG of your own cluster)"
    return None if shutil.which("go") else "go (or KUBECONFIG of your own cluster)"


def start_lab_build() -> subprocess.Popen[bytes] | None:
    """Build the lab's programs and base image beside the first suites: minutes once, nothing on a warm machine."""
    if own_cluster() or missing_cluster() is not None:
        return None
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build/lab-build.log").open("wb") as log:
        return subprocess.Popen(
            # After whatever is being tested meanwhile: some of it measures.
            ["nice", "-n", "10", "sh", "-c", f"{LAB} deps && {LAB} build && {LAB} build helm && {LAB} image base"],
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )


def run(suite: Suite, require_all: bool) -> Result:
    """Run one suite's commands until the first failure, then its cleanup."""
    started = time.monotonic()
    lacking = suite.missing()
    if lacking is not None:
        outcome = Outcome.FAILED if require_all else Outcome.SKIPPED
        return Result(suite, outcome, f"missing: {lacking}", 0.0)
    detail = ""
    try:
        if suite.lanes > 1:
            detail = "; ".join(run_lanes(suite))
        else:
            detail = next(filter(None, (failure(command, suite.limit_s) for command in suite.commands)), "")
    finally:
        for command in suite.cleanup:
            left = failure(command, suite.limit_s)
            detail = detail or (f"cleanup: {left}" if left else "")
    return Result(suite, Outcome.FAILED if detail else Outcome.PASSED, detail, time.monotonic() - started)


def run_lanes(suite: Suite) -> list[str]:
    """Run all commands, ``suite.lanes`` at a time; return what went wrong. Each one's output appears at its end."""

    def run_quietly(command: Command) -> str:
        with tempfile.TemporaryFile("w+") as output:
            problem = failure(command, suite.limit_s, output)
            output.seek(0)
            print(output.read(), end="", flush=True)
        return problem

    with ThreadPoolExecutor(suite.lanes) as lanes:
        return [problem for problem in lanes.map(run_quietly, suite.commands) if problem]


def failure(command: Command, limit_s: int, output: IO[str] | None = None) -> str:
    """Run one command, its output shown or written to ``output``; return "" or what went wrong."""
    shown = " ".join(command).replace(f"{ROOT}/", "")
    print(f"── {shown}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if command[0] != LAB and "cluster and not gpu" in command and not own_cluster():
        environment["KUBECONFIG"] = lab_kubeconfig()
    try:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit_s, check=False, stdout=output, stderr=output
        ).returncode
    except subprocess.TimeoutExpired:
        return f"`{shown}` was still running after {limit_s} s"
    return "" if status == 0 else f"`{shown}` ended with status {status}"


def lab_kubeconfig() -> str:
    """Return the running lab's kubeconfig path."""
    text = subprocess.run([LAB, "env"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return next(word.split("=", 1)[1] for word in text.split() if word.startswith("KUBECONFIG="))


def report(results: Sequence[Result]) -> None:
    """Print one line a suite, and the closing count."""
    print("\nsuites:")
    for result in results:
        print(f"  {result.outcome:8} {result.suite.name:8} {result.wall_s:6.0f} s  {result.suite.purpose}")
        if result.detail:
            print(f"           {result.detail}")
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    print(f"\n{counts[Outcome.PASSED]} passed, {counts[Outcome.FAILED]} failed, {counts[Outcome.SKIPPED]} skipped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
