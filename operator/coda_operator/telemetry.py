"""What engines and routers say about themselves, asked at their pods' addresses."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

import aiohttp

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.interface import PROFILE_PATH, SETTINGS_PATH, SNAPSHOT_PATH
from coda_engine.contract.models import WireModel
from coda_engine.contract.profile import Profile
from coda_engine.contract.settings import Settings
from coda_engine.contract.snapshot import EngineSnapshot
from coda_operator.desired.engine_pod import ENGINE_PORT
from coda_operator.desired.router import ROUTER_CONTAINER_PORT
from coda_operator.observed import EngineReport, RouterReport
from coda_operator.pods import Pod

_TIMEOUT = aiohttp.ClientTimeout(total=3)
# An engine takes new settings between two steps, and one step of a long prefill can take seconds.
_PUT_TIMEOUT = aiohttp.ClientTimeout(total=15)
_MAX_ANSWER_BYTES = 4 * 2**20


class _SettingsAnswer(WireModel):
    """The part of an answer to GET settings that matters here."""

    digest: str


class Telemetry:
    """Asks pods; holds one pool of connections for ``async with``."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def engines(self, pods: Sequence[Pod], token: str | None) -> list[EngineReport]:
        """Return a report for each pod that serves, in the order of ``pods``; never raises for a silent one."""
        return list(await asyncio.gather(*(self._engine(pod, token) for pod in pods if pod.ready and pod.ip)))

    async def routers(self, pods: Sequence[Pod], token: str | None) -> list[RouterReport]:
        """Return a report for each pod that runs, in the order of ``pods``; never raises for a silent one."""
        return list(await asyncio.gather(*(self._router(pod, token) for pod in pods if pod.running and pod.ip)))

    async def put_settings(self, address: str, settings: Settings, token: str | None) -> str:
        """Hand the settings to an engine or router; return why it did not take them, "" if it did."""
        return await self._put(address + SETTINGS_PATH, settings.model_dump_json(by_alias=True).encode(), token)

    async def put_profile(self, address: str, profile: Profile, token: str | None) -> str:
        """Hand the profile to an engine; return why it did not take it, "" if it did."""
        return await self._put(address + PROFILE_PATH, profile.to_json(), token)

    async def _engine(self, pod: Pod, token: str | None) -> EngineReport:
        address = f"http://{_host(pod.ip)}:{ENGINE_PORT}"
        try:
            snapshot = EngineSnapshot.from_json(await self._get(address + SNAPSHOT_PATH, token))
        except _Unanswered as error:
            return EngineReport(pod.name, address, None, str(error))
        except DocumentError as error:
            return EngineReport(pod.name, address, None, f"unreadable snapshot: {error}")
        return EngineReport(pod.name, address, snapshot)

    async def _router(self, pod: Pod, token: str | None) -> RouterReport:
        address = f"http://{_host(pod.ip)}:{ROUTER_CONTAINER_PORT}"
        try:
            digest = _SettingsAnswer.from_json(await self._get(address + SETTINGS_PATH, token)).digest
        except _Unanswered as error:
            return RouterReport(pod.name, address, None, str(error))
        except DocumentError as error:
            return RouterReport(pod.name, address, None, f"unreadable answer: {error}")
        return RouterReport(pod.name, address, digest)

    async def _get(self, url: str, token: str | None) -> bytes:
        try:
            async with self._open().get(url, headers=_headers(token)) as response:
                body = await _whole(response)
                if response.status != 200:
                    raise _Unanswered(f"{url}: HTTP {response.status}: {body[:200].decode(errors='replace')}")
                return body
        except (aiohttp.ClientError, OSError) as error:
            raise _Unanswered(f"{url}: {type(error).__name__}: {error}".rstrip(": ")) from error

    async def _put(self, url: str, body: bytes, token: str | None) -> str:
        headers = {**_headers(token), "Content-Type": "application/json"}
        try:
            async with self._open().put(url, data=body, headers=headers, timeout=_PUT_TIMEOUT) as response:
                answer = await _whole(response)
                return (
                    "" if response.status == 200 else f"HTTP {response.status}: {answer[:300].decode(errors='replace')}"
                )
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Telemetry in `async with`")
        return self._session


class _Unanswered(Exception):
    """A pod did not answer as asked; only ever turned into a report."""


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body; one read returns only what has arrived so far."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer is larger than {_MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _headers(token: str | None) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
