"""The routes under ``/coda``: what each answers is said in :mod:`coda_engine.contract.interface`."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from coda_engine.contract import interface
from coda_engine.contract.errors import DocumentError
from coda_engine.contract.profile import MAX_PROFILE_BYTES
from coda_engine.contract.settings import MAX_SETTINGS_BYTES
from coda_engine.contract.turns import MAX_TURN_BYTES, TurnEnd
from coda_engine.vllm_adapter.http.reader import PagesReader
from coda_engine.vllm_adapter.telemetry.sessions import delta

Apply = Callable[[str], Awaitable[dict[str, str]]]
"""Hands a document to the engine; answers when the step in progress has ended."""


Forget = Callable[[], Awaitable[bool]]
"""Makes the engine forget the KV that is cached in HBM; answers whether it was idle enough to."""


EndTurn = Callable[[TurnEnd], Awaitable[None]]
"""Tells the engine what a session waits for."""


def build_router(
    reader: PagesReader,
    token: str | None,
    apply_settings: Apply,
    apply_profile: Apply,
    forget_hbm: Forget,
    end_turn: EndTurn,
) -> APIRouter:
    """Return the router of the internal endpoints.

    Args:
        reader: Reads the engine's pages.
        token: What internal callers must present; None = open, "" = nobody can.
        apply_settings: Hands a settings document to the engine.
        apply_profile: Hands a profile to the engine.
        forget_hbm: Drops what is cached in HBM.
        end_turn: Tells the engine of a turn's end.
    """
    router = APIRouter(include_in_schema=False, dependencies=[Depends(_token_check(token))])
    _add_reads(router, reader)
    _add_writes(router, apply_settings, apply_profile)
    _add_forgetting(router, forget_hbm)
    _add_turns(router, end_turn)
    return router


def _token_check(token: str | None) -> Callable[[str | None], None]:
    def check(authorization: Annotated[str | None, Header()] = None) -> None:
        if token is None:
            return
        given = (authorization or "").removeprefix("Bearer ")
        if not token or not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "this endpoint asks for the internal token as a bearer token")

    return check


def _add_reads(router: APIRouter, reader: PagesReader) -> None:
    @router.get(interface.SNAPSHOT_PATH)
    async def snapshot(request: Request, since: int | None = None) -> Response:
        content = reader.snapshot()
        if since is None:
            return Response(content.payload, media_type="application/json")
        return StreamingResponse(_snapshots(reader, request, since), media_type="application/x-ndjson")

    @router.get(interface.SESSIONS_PATH)
    async def sessions(instance: str = "", since: int = 0) -> dict[str, object]:
        return delta(reader.sessions(), instance, since)

    @router.get(interface.KEYS_PATH)
    async def keys() -> dict[str, object]:
        control = reader.control()
        return {"spec_key_digest": control["spec_key_digest"], "full_key": control["full_key"]}

    @router.get(interface.SETTINGS_PATH)
    async def settings() -> dict[str, object]:
        control = reader.control()
        return {"digest": control["settings_digest"], "settings": control["settings"]}

    @router.get(interface.PROFILE_PATH)
    async def profile() -> dict[str, object]:
        in_force = reader.control()["profile"]
        if in_force is None:
            raise HTTPException(404, "no profile is in force")
        return in_force

    @router.get(interface.DECISIONS_PATH)
    async def decisions(since: int = 0) -> dict[str, object]:
        document = reader.decisions()
        first = document["next"] - len(document["decisions"])
        return {"next": document["next"], "decisions": document["decisions"][max(0, since - first) :]}


def _add_writes(router: APIRouter, apply_settings: Apply, apply_profile: Apply) -> None:
    @router.put(interface.SETTINGS_PATH)
    async def put_settings(request: Request) -> Response:
        return _applied(await apply_settings(await _body(request, MAX_SETTINGS_BYTES)))

    @router.put(interface.PROFILE_PATH)
    async def put_profile(request: Request) -> Response:
        return _applied(await apply_profile(await _body(request, MAX_PROFILE_BYTES)))


def _add_forgetting(router: APIRouter, forget_hbm: Forget) -> None:
    @router.post(interface.HBM_FORGET_PATH)
    async def forget() -> dict[str, bool]:
        if not await forget_hbm():
            raise HTTPException(409, "the engine has requests or transfers under way; ask again when it is idle")
        return {"forgotten": True}


def _add_turns(router: APIRouter, end_turn: EndTurn) -> None:
    @router.post(interface.TURNS_PATH)
    async def turns(request: Request) -> dict[str, str]:
        try:
            turn = TurnEnd.from_json(await _body(request, MAX_TURN_BYTES))
        except DocumentError as error:
            raise HTTPException(400, str(error)) from error
        await end_turn(turn)
        return {}


async def _snapshots(reader: PagesReader, request: Request, since: int) -> AsyncIterator[bytes]:
    """Yield each newer snapshot as a line, the latest one again after a second without change, until the end."""
    loop = asyncio.get_running_loop()
    version, sent_at_s = since, float("-inf")
    while not (_stopping(request) or await request.is_disconnected()):
        try:
            content = reader.snapshot()
        except HTTPException:
            # Taken back while it was streamed: the next request is told why.
            return
        now_s = loop.time()
        if content.version != version or now_s - sent_at_s >= interface.SNAPSHOT_HEARTBEAT_S:
            version, sent_at_s = content.version, now_s
            yield content.payload + b"\n"
        await asyncio.sleep(interface.SNAPSHOT_INTERVAL_S)


def _stopping(request: Request) -> bool:
    """Return whether the server wants to end: it waits for open streams, which therefore must end themselves."""
    server = getattr(request.app.state, "server", None)
    return bool(getattr(server, "should_exit", False))


async def _body(request: Request, limit: int) -> str:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(400, f"the document is larger than {limit} bytes")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the document is not UTF-8: {error}") from error


def _applied(answer: dict[str, str]) -> Response:
    if "error" in answer:
        raise HTTPException(400, answer["error"])
    return JSONResponse(answer, status_code=409 if "reason" in answer else 200)
