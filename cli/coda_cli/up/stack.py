"""The whole stack of one CodaCluster on this machine: started in order, kept up, ended without a trace."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coda_cli.errors import StackError
from coda_cli.up import layout
from coda_cli.up.cluster_file import ClusterFile
from coda_cli.up.guardian import FAREWELL
from coda_cli.up.leftovers import end_run
from coda_cli.up.machine import LOOPBACK, Machine, free_ports
from coda_cli.up.process_table import group_members, mapped_shared_memory
from coda_cli.up.profiles import provide_profile, require_given_profile, stored_profile_file
from coda_cli.up.report import Report
from coda_cli.up.run_record import RunLog, RunRecord, StateDir, boot_id
from coda_cli.up.supervised import SupervisedProcess, Supervision
from coda_engine.profiling import EngineClient
from coda_operator.spec import ProfilingMode

END_GRACE_S = 5.0
ROUTER_STARTUP_TIMEOUT_S = 60.0

_SHARED_MEMORY_SCAN_S = 0.5
_GUARDIAN_END_S = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stack runs.

    Attributes:
        machine: The machine as it was looked at.
        port: The router's port.
        model_path: Folder of a local model; None for a hub model.
        state: The CodaCluster's folder of state.
        cache: Coda's folder in the user's cache.
        surroundings: Environment that the processes inherit.
        given_profile: Profile file that a person asked for; None = stored or measured.
    """

    machine: Machine
    port: int
    model_path: Path | None
    state: StateDir
    cache: Path
    surroundings: Mapping[str, str]
    given_profile: Path | None = None

    @property
    def url(self) -> str:
        """The router's base URL."""
        return f"http://{LOOPBACK}:{self.port}"


class Stack:
    """Engines, their profile and a router; the caller holds the state folder's lock."""

    def __init__(self, cluster: ClusterFile, place: Place, report: Report) -> None:
        self._cluster = cluster
        self._place = place
        self._report = report
        spec = cluster.spec
        self._key = spec.spec_key(place.machine.vllm_version or "")
        self._stored_profile = stored_profile_file(place.cache, self._key)
        given = place.given_profile
        if given is not None and spec.profiling.mode is ProfilingMode.DISABLED:
            raise StackError(
                f"--profile {given}: spec.profiling.mode is Disabled, so that no profile is used; set it to Required, "
                "or leave --profile out"
            )
        self._given_profile = require_given_profile(given, self._key) if given is not None else None
        self._folders = layout.make_folders(cluster.name, spec)
        self._engine_ports = free_ports(place.port + 1, spec.engine.replicas)
        self._run = RunLog(place.state, self._record())
        self._engines, self._router = self._processes()

    async def serve(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        """Run until ``stop`` is set; ``ready`` is set once requests are served. Nothing is left when it returns.

        Raises:
            StackError: A process did not come up, or the engine could not be measured.
        """
        guardian = await self._start_guardian()
        serving = asyncio.create_task(self._keep_serving(ready))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                self._report("stopping")
        finally:
            for task in (serving, stopping):
                task.cancel()
            outcomes = await asyncio.gather(serving, stopping, return_exceptions=True)
            await self._end(guardian)
        failure = outcomes[0]
        if isinstance(failure, ExceptionGroup):
            raise failure.exceptions[0]
        if isinstance(failure, Exception):
            raise failure

    async def _keep_serving(self, ready: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._note_shared_memory())
            for engine in self._engines:
                tasks.create_task(engine.run_forever())
            await self._all_ready()
            if self._cluster.spec.profiling.mode is ProfilingMode.REQUIRED:
                await self._provide_profile()
            else:
                self._report("spec.profiling.mode is Disabled: admission stays first come, first served")
            tasks.create_task(self._router.run_forever())
            await self._router.ready.wait()
            ready.set()

    async def _all_ready(self) -> None:
        for engine in self._engines:
            await engine.ready.wait()

    async def _provide_profile(self) -> None:
        """Give every engine its profile; begin again if one of them died meanwhile."""
        token = self._folders.internal_token_file.read_text(encoding="ascii")
        clients = [EngineClient(engine.url, token) for engine in self._engines]
        quick = self._cluster.spec.profiling.quick
        while True:
            restarts = self._restarts
            try:
                await asyncio.to_thread(
                    provide_profile, clients, self._stored_profile, self._given_profile, quick, self._report
                )
                return
            except StackError:
                await asyncio.sleep(1.0)
                if self._restarts == restarts and all(engine.ready.is_set() for engine in self._engines):
                    raise
            await self._all_ready()

    @property
    def _restarts(self) -> int:
        return sum(engine.restarts for engine in self._engines)

    async def _note_shared_memory(self) -> None:
        """Write down what the processes make in /dev/shm: names are random, a dead one's could not be told later."""
        while True:
            self._run.set_shared_memory(_made_shared_memory(self._run.record))
            await asyncio.sleep(_SHARED_MEMORY_SCAN_S)

    async def _start_guardian(self) -> asyncio.subprocess.Process:
        with (self._place.state.logs / "guardian.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "coda_cli.up.guardian", str(self._place.state.path)),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _end(self, guardian: asyncio.subprocess.Process) -> None:
        processes: Sequence[SupervisedProcess] = (self._router, *self._engines)
        await asyncio.gather(*(process.end(END_GRACE_S) for process in processes))
        await asyncio.to_thread(end_run, self._run.record, 0.5)
        # An orderly end: nobody comes back for what the CPU shadow holds. Whoever is killed does not come here.
        await asyncio.to_thread(layout.remove_shadow, self._folders.shadow)
        self._place.state.forget()
        if guardian.stdin is not None:
            with suppress(OSError):
                guardian.stdin.write(FAREWELL)
                guardian.stdin.close()
        try:
            await asyncio.wait_for(guardian.wait(), _GUARDIAN_END_S)
        except TimeoutError:
            guardian.kill()
            await guardian.wait()

    def _record(self) -> RunRecord:
        return RunRecord(
            name=self._cluster.name,
            url=self._place.url,
            engine_urls=tuple(f"http://{LOOPBACK}:{port}" for port in self._engine_ports),
            pid=os.getpid(),
            boot_id=boot_id(),
            python=os.path.realpath(sys.executable),
            scratch_dir=str(self._folders.scratch),
            page_dir=str(self._folders.pages),
        )

    def _processes(self) -> tuple[list[SupervisedProcess], SupervisedProcess]:
        spec, place = self._cluster.spec, self._place
        ports = self._engine_ports
        # An engine that is started again loads what the first one was given.
        profile = place.given_profile.absolute() if place.given_profile is not None else self._stored_profile
        engines = layout.engine_processes(
            spec, self._key, self._folders, ports, place.model_path, profile, place.machine.cores
        )
        router = layout.router_process_here(self._folders, place.port, ports)
        environment = layout.child_environment(place.surroundings, self._folders.temporary, place.cache)
        engine_rules = Supervision(float(spec.engine.startup_timeout_seconds), restart_when_unhealthy=True)
        router_rules = Supervision(ROUTER_STARTUP_TIMEOUT_S, restart_when_unhealthy=False)
        supervised = []
        for process, rules in [*((engine, engine_rules) for engine in engines), (router, router_rules)]:
            log_file = place.state.logs / f"{process.name}.log"
            _keep_previous(log_file)
            supervised.append(SupervisedProcess(process, environment, log_file, rules, self._run, self._report))
        return supervised[:-1], supervised[-1]


def _made_shared_memory(record: RunRecord) -> set[str]:
    """Return the files in /dev/shm that the run's processes have made, now and before, and that still exist."""
    members = [pid for group in record.groups for pid in group_members(group)]
    known = set(record.shared_memory) | mapped_shared_memory(members)
    return {file for file in known if os.path.exists(file)}


def _keep_previous(log_file: Path) -> None:
    """Keep the log of the run before under another name, so that each run starts an empty one."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    if log_file.exists():
        log_file.replace(log_file.with_suffix(".log.1"))
