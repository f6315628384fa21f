"""Coda's router as a child process in front of engines."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from coda_bench.engine.child import end_group, wait_until_serving
from coda_bench.engine.server import EngineStartError
from coda_bench.ports import free_ports
from coda_engine.contract.settings import Settings
from coda_operator.desired.processes import RouterPlace, router_process

START_LIMIT_S = 60.0
_STOP_LIMIT_S = 10.0


@asynccontextmanager
async def running_router(settings: Settings, workers: Sequence[str]) -> AsyncIterator[str]:
    """Start a router in front of engines (base URLs), yield its own URL once it is ready, and end it after.

    Raises:
        EngineStartError: It was not ready within START_LIMIT_S.
    """
    folder = Path(tempfile.mkdtemp(prefix="coda-bench-router-"))
    try:
        (folder / "settings.json").write_text(settings.model_dump_json(by_alias=True))
        place = RouterPlace(
            name="router",
            python=sys.executable,
            host="127.0.0.1",
            port=free_ports(1)[0],
            settings_file=str(folder / "settings.json"),
            workers=tuple(workers),
        )
        process = router_process(place)
        with (folder / "log").open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "TERM"), *process.argv, stdout=log, stderr=log,
                env={**os.environ, **process.env}, start_new_session=True,
            )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{process.port}"
            if not await wait_until_serving(url + process.ready_path, child, START_LIMIT_S):
                raise EngineStartError(f"the router did not become ready:\n{_tail(folder / 'log')}")
            yield url
        finally:
            await end_group(child, _STOP_LIMIT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1_500:]
