"""Child processes that lead a group of their own: waited for until they serve, and ended with all that they started."""

import asyncio
import os
import signal
from contextlib import suppress

import aiohttp

_PAUSE_S = 0.25


async def wait_until_serving(url: str, child: asyncio.subprocess.Process, limit_s: float) -> bool:
    """Return whether ``url`` answered with 200 within ``limit_s`` seconds; False at once when the child has ended."""
    deadline_s = asyncio.get_running_loop().time() + limit_s
    async with aiohttp.ClientSession() as client:
        while child.returncode is None and asyncio.get_running_loop().time() < deadline_s:
            with suppress(aiohttp.ClientError):
                async with client.get(url) as reply:
                    if reply.status == 200:
                        return True
            await asyncio.sleep(_PAUSE_S)
    return False


async def end_group(child: asyncio.subprocess.Process, limit_s: float) -> None:
    """Let the child end its own children and shared memory; after ``limit_s`` end whatever is left of the group."""
    with suppress(ProcessLookupError, TimeoutError):
        child.terminate()
        await asyncio.wait_for(child.wait(), limit_s)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()
