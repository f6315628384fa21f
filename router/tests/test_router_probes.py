"""What clients and load tools ask before they begin: answered without a key, with or without a body."""

from pathlib import Path

import pytest
from router_harness import raw_exchange, running_router
from scripted_worker import running_worker

PROBES = ["/", "/health", "/healthz", "/readyz", "/metrics"]


@pytest.mark.parametrize("path", PROBES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_probe_needs_no_key_and_reaches_no_engine(tmp_path: Path, method: str, path: str):
    (tmp_path / "alice").write_text("alice-key-1")
    async with running_worker() as worker, running_router(worker, api_keys_dir=tmp_path) as router:
        request = f"{method} {path} HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n".encode()
        head, _, body = (await raw_exchange(router.port, request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert bool(body) is (method == "GET")
        assert not worker.requests


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_is_503_with_retry_after_while_no_engine_answers(method: str):
    async with running_worker(is_healthy=False, is_coda=False) as worker, running_router(worker) as router:
        async with router.session.request(method, f"{router.url}/health") as reply:
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) >= 1
