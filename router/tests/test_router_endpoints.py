"""Workers found by a Kubernetes Service: from EndpointSlices to the fleet, over a real HTTP watch."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from router_harness import running_router, until
from scripted_worker import running_worker

from coda_router.errors import ConfigurationError
from coda_router.fleet import endpoints
from coda_router.fleet.endpoints import KubernetesService, workers_of


@pytest.fixture(autouse=True)
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "RETRY_INTERVAL_S", 0.05)


def endpoint(address: str, pod: str = "", **conditions: bool) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": pod}} if pod else {}
    return {"addresses": [address], "conditions": conditions, **target}


def endpoint_slice(name: str, port: int | None, *endpoints: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "ports": [{"name": "http", "port": port}] if port else None,
        "endpoints": list(endpoints),
    }


def test_ready_endpoints_are_workers_named_after_their_pods():
    slices = [
        endpoint_slice("s1", 8000, endpoint("10.0.0.1", "pod-a", ready=True), endpoint("10.0.0.2")),
        endpoint_slice("s2", 8000, endpoint("fd00::3", "pod-c", ready=True, serving=True)),
    ]
    workers = workers_of(slices)
    assert {name: worker.authority for name, worker in workers.items()} == {
        "pod-a": "10.0.0.1:8000",
        "10.0.0.2:8000": "10.0.0.2:8000",
        "pod-c": "[fd00::3]:8000",
    }


def test_endpoints_that_are_not_ready_end_or_have_no_port_are_none():
    slices = [
        endpoint_slice("s1", 8000, endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2", terminating=True)),
        endpoint_slice("s2", None, endpoint("10.0.0.3", ready=True)),
        {"metadata": {"name": "s3"}, "ports": [{"port": 1}], "endpoints": None},
        {"metadata": {"name": "s4"}, "ports": [{"port": 1}], "endpoints": [{"addresses": []}]},
    ]
    assert workers_of(slices) == {}


@pytest.mark.parametrize("text", ["", "name", "/name", "ns/", "ns/name/more"])
def test_a_service_is_given_as_namespace_and_name(text: str):
    with pytest.raises(ConfigurationError, match="NAMESPACE/SERVICE"):
        KubernetesService.parse(text, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_outside_of_a_pod_discovery_says_what_to_give_instead():
    with pytest.raises(ConfigurationError, match="--workers"):
        KubernetesService.parse("ns/name", {})


def test_the_api_is_reached_as_pods_do():
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert KubernetesService.parse("ns/name", environment).api_url == "https://[fd00::1]:6443"


class ScriptedApi:
    """The two requests of the Kubernetes API that discovery makes."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.seen: list[tuple[str, dict[str, str], str]] = []
        self.watches: set[asyncio.Queue[bytes | None]] = set()
        self.ends_watches_at_once = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path, dict(request.query), request.headers.get("authorization", "")))
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "5"}, "items": list(self.slices.values())})
        response = web.StreamResponse()
        await response.prepare(request)
        if self.ends_watches_at_once:
            return response
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.watches.add(events)
        while (line := await events.get()) is not None:
            await response.write(line)
        self.watches.discard(events)
        return response

    def tell(self, kind: str, item: dict[str, Any]) -> None:
        for events in self.watches:
            events.put_nowait(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def end_watches(self) -> None:
        for events in list(self.watches):
            events.put_nowait(None)


@contextlib.asynccontextmanager
async def running_api() -> AsyncIterator[tuple[ScriptedApi, str]]:
    api = ScriptedApi()
    app = web.Application()
    app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield api, f"http://127.0.0.1:{port}"
    finally:
        api.end_watches()
        await runner.cleanup()


async def test_the_fleet_follows_a_service_s_endpoints(tmp_path):
    (tmp_path / "token").write_text("service-account-token")
    async with running_api() as (api, url), running_worker() as a, running_worker() as b:
        slice_a = endpoint_slice("s1", a.port, endpoint("127.0.0.1", "pod-a", ready=True))
        slice_b = endpoint_slice("s2", b.port, endpoint("127.0.0.1", "pod-b", ready=True))
        api.slices["s1"] = slice_a
        service = KubernetesService("ns", "engines", url, credentials_dir=tmp_path)
        async with running_router(discovery=service) as router:
            workers = router.router.dispatcher.fleet.workers

            async def follow(*expected: str) -> None:
                await until(lambda: set(workers) == set(expected) and all(w.is_healthy for w in workers.values()))

            await follow("pod-a")
            await until(lambda: api.watches)
            api.tell("ADDED", slice_b)
            await follow("pod-a", "pod-b")
            assert (await router.chat())[0] == 200
            api.tell("MODIFIED", endpoint_slice("s1", a.port, endpoint("127.0.0.1", "pod-a", ready=False)))
            await follow("pod-b")
            api.tell("DELETED", slice_b)
            await follow()
            assert (await router.chat())[0] == 503
    path, query, authorization = api.seen[0]
    assert path.endswith("/namespaces/ns/endpointslices")
    assert query == {"labelSelector": "kubernetes.io/service-name=engines"}
    assert authorization == "Bearer service-account-token"


async def test_an_expired_watch_is_followed_by_a_new_list(tmp_path):
    async with running_api() as (api, url), running_worker() as a:
        service = KubernetesService("ns", "engines", url, credentials_dir=tmp_path)
        async with running_router(discovery=service) as router:
            await until(lambda: api.watches)
            api.slices["s1"] = endpoint_slice("s1", a.port, endpoint("127.0.0.1", "pod-a", ready=True))
            api.tell("ERROR", {"kind": "Status", "code": 410, "metadata": {}})
            await until(lambda: set(router.router.dispatcher.fleet.workers) == {"pod-a"})


async def test_a_watch_that_ends_at_once_is_not_opened_in_a_loop(tmp_path, monkeypatch: pytest.MonkeyPatch):
    async with running_api() as (api, url), running_worker() as a:
        monkeypatch.setattr(endpoints, "RETRY_INTERVAL_S", 0.2)
        api.ends_watches_at_once = True
        service = KubernetesService("ns", "engines", url, credentials_dir=tmp_path)
        async with running_router(discovery=service) as router:
            await until(lambda: len(api.seen) >= 2)
            asked = len(api.seen)
            await asyncio.sleep(1.0)
            assert 1 <= len(api.seen) - asked <= 6
            api.ends_watches_at_once = False
            await until(lambda: api.watches)
            api.tell("ADDED", endpoint_slice("s1", a.port, endpoint("127.0.0.1", "pod-a", ready=True)))
            await until(lambda: set(router.router.dispatcher.fleet.workers) == {"pod-a"})


async def test_while_the_api_does_not_answer_the_known_workers_stay(tmp_path):
    async with running_worker() as a:
        async with running_api() as (api, url):
            api.slices["s1"] = endpoint_slice("s1", a.port, endpoint("127.0.0.1", "pod-a", ready=True))
            service = KubernetesService("ns", "engines", url, credentials_dir=tmp_path)
            router_context = running_router(discovery=service)
            router = await router_context.__aenter__()
            workers = router.router.dispatcher.fleet.workers
            await until(lambda: api.watches and any(worker.is_healthy for worker in workers.values()))
        try:
            assert (await router.chat())[0] == 200
        finally:
            await router_context.__aexit__(None, None, None)


async def test_whatever_the_api_says_discovery_goes_on(tmp_path):
    async with running_api() as (api, url), running_worker() as a:
        api.slices["s1"] = endpoint_slice("s1", a.port, endpoint("127.0.0.1", "pod-a", ready=True))
        service = KubernetesService("ns", "engines", url, credentials_dir=tmp_path)
        async with running_router(discovery=service) as router:
            workers = router.router.dispatcher.fleet.workers
            await until(lambda: api.watches and set(workers) == {"pod-a"})
            api.tell("ADDED", {"metadata": None})
            api.slices["s3"] = endpoint_slice("s3", a.port, endpoint("127.0.0.1", "pod-c", ready=True))
            await until(lambda: set(workers) == {"pod-a", "pod-c"})


async def test_a_ca_that_cannot_be_read_yet_is_tried_again(tmp_path):
    (tmp_path / "ca.crt").write_text("not written yet")
    async with running_api() as (api, url), running_worker() as a:
        api.slices["s1"] = endpoint_slice("s1", a.port, endpoint("127.0.0.1", "pod-a", ready=True))
        service = KubernetesService("ns", "engines", url, credentials_dir=tmp_path)
        async with running_router(discovery=service) as router:
            assert not router.router.dispatcher.fleet.workers
            (tmp_path / "ca.crt").unlink()
            await until(lambda: set(router.router.dispatcher.fleet.workers) == {"pod-a"})
