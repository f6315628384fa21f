"""A real router in the test's event loop, on a real socket, and two ways to talk to it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from scripted_worker import ScriptedWorker

from coda_router.config import RouterConfig
from coda_router.fleet.address import WorkerAddress
from coda_router.server import Router, bind, make_server, run_router

ROUTER_ID = "router-under-test"
SECRET = b"a secret of the cluster under test"


@dataclass
class RunningRouter:
    router: Router
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def chat(self, text: str = "hi", **options: Any) -> tuple[int, bytes]:
        """Return status and body of one chat completion."""
        headers = options.pop("headers", None)
        body = {"model": "small", "messages": [{"role": "user", "content": text}]} | options
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as reply:
            return reply.status, await reply.read()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}{path}", **options) as reply:
            body = await reply.read()
            return reply.status, json.loads(body) if reply.content_type == "application/json" else body.decode()

    async def decisions(self) -> list[dict[str, Any]]:
        _, document = await self.get("/coda/decisions")
        kept: list[dict[str, Any]] = document["decisions"]
        return kept


@contextlib.asynccontextmanager
async def running_router(*workers: ScriptedWorker, **options: Any) -> AsyncIterator[RunningRouter]:
    """Start a router in front of ``workers``."""
    config = RouterConfig(
        host=options.pop("host", "127.0.0.1"),
        port=0,
        workers=() if options.get("discovery") else tuple(WorkerAddress.parse(worker.url) for worker in workers),
        router_id=ROUTER_ID,
        **({"cluster_secret": SECRET, "grace_s": 1.0} | options),
    )
    listener = bind(config.host, config.port)
    port = listener.getsockname()[1]
    router = Router(config)
    server = make_server(router, config)
    serving = asyncio.create_task(run_router(router, server, listener))
    async with aiohttp.ClientSession() as session:
        await until(lambda: server.started or serving.done())
        try:
            yield RunningRouter(router, port, session)
        finally:
            server.should_exit = True
            await serving


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds; the limit only ends a broken test."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def raw_exchange(port: int, *sent: bytes, close_after: int | None = None) -> bytes:
    """Send bytes on one connection; return everything that comes back until the router closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for data in sent:
            writer.write(data)
            await writer.drain()
        return await reader.read() if close_after is None else await reader.readexactly(close_after)
    finally:
        writer.close()


def post(path: str, body: bytes, *headers: str, close: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: router", f"content-length: {len(body)}", *headers]
    if close:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def chat_body(text: str = "hi", model: str = "small") -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
