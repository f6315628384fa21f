"""Health, metrics and administration, on the same port, by FastAPI: nothing here is on the data path."""

import hmac
from http import HTTPStatus

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.interface import DECISIONS_PATH, SETTINGS_PATH
from coda_engine.contract.settings import MAX_SETTINGS_BYTES, Settings
from coda_router.auth.keys import ApiKeys
from coda_router.dispatch import RETRY_AFTER_S, Dispatcher
from coda_router.live_settings import LiveSettings
from coda_router.metrics import RouterMetrics


def make_admin_app(
    dispatcher: Dispatcher,
    settings: LiveSettings,
    metrics: RouterMetrics,
    keys: ApiKeys,
    *,
    router_id: str,
    internal_token: str | None,
    is_loopback: bool,
) -> FastAPI:
    """Return the application for every path that is not proxied.

    Without an internal token, administration is open where only this machine can reach it, and closed elsewhere.
    """
    # No generated documentation pages: they would load scripts from elsewhere.
    app = FastAPI(title="Coda router", docs_url=None, redoc_url=None, openapi_url=None)
    internal = [Depends(_TokenCheck(internal_token, is_open=is_loopback))]

    @app.api_route("/", methods=["GET", "HEAD"])
    async def root() -> dict[str, str]:
        return {"service": "coda-router"}

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> Response:
        workers = dispatcher.fleet.workers.values()
        ready = sum(worker.is_healthy for worker in workers)
        text = f"{ready} of {len(workers)} engines answer"
        if ready:
            return PlainTextResponse(text)
        return PlainTextResponse(
            text, status_code=HTTPStatus.SERVICE_UNAVAILABLE, headers={"retry-after": str(RETRY_AFTER_S)}
        )

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/coda/status", dependencies=internal)
    async def status() -> dict[str, object]:
        return {
            "router_id": router_id,
            "settings_digest": settings.digest,
            "held_requests": len(dispatcher.holding),
            "sessions": len(dispatcher.sessions),
            "workers": _describe_workers(dispatcher),
            "api_keys": _describe_keys(keys),
        }

    @app.get(DECISIONS_PATH, dependencies=internal)
    async def decisions(since: int = 0) -> dict[str, object]:
        return dispatcher.decisions.since(since)

    @app.get(SETTINGS_PATH, dependencies=internal)
    async def read_settings() -> dict[str, object]:
        return {
            "digest": settings.digest,
            "settings": settings.settings.model_dump(mode="json", by_alias=True),
        }

    @app.put(SETTINGS_PATH, dependencies=internal)
    async def write_settings(request: Request) -> Response:
        body = await request.body()
        if len(body) > MAX_SETTINGS_BYTES:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a settings document has at most {MAX_SETTINGS_BYTES} bytes"
            )
        try:
            settings.replace(Settings.parse(body))
        except DocumentError as error:
            return JSONResponse({"detail": str(error)}, HTTPStatus.BAD_REQUEST)
        return JSONResponse({"digest": settings.digest})

    return app


def _describe_workers(dispatcher: Dispatcher) -> list[dict[str, object]]:
    return [
        {
            "name": worker.name,
            "url": worker.address.url,
            "healthy": worker.is_healthy,
            "ejected": worker.ejection.is_ejected,
            "instance_id": worker.snapshot.instance_id if worker.snapshot else None,
            "draining": worker.snapshot.draining if worker.snapshot else False,
            "models": sorted(worker.models),
            "in_flight_requests": worker.in_flight_requests,
        }
        for worker in dispatcher.fleet.workers.values()
    ]


def _describe_keys(keys: ApiKeys) -> list[dict[str, object]]:
    return [
        {
            "tenant": account.key.tenant,
            "in_flight_requests": account.in_flight_requests,
            "limited_requests": account.limited_requests,
        }
        for account in keys.accounts
    ]


class _TokenCheck:
    """Lets a request pass that carries the internal token; without one everybody, or nobody.

    Args:
        token: The internal token; None where none is configured.
        is_open: Whether everybody may pass where none is configured.
    """

    def __init__(self, token: str | None, *, is_open: bool) -> None:
        self._expected = f"Bearer {token}".encode() if token else None
        self._is_open = is_open

    async def __call__(self, request: Request) -> None:
        if self._expected is None and not self._is_open:
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                "this endpoint wants an internal token, and the router has none: start it with --internal-token-file",
            )
        presented = request.headers.get("authorization", "").encode("latin-1")
        if self._expected is not None and not hmac.compare_digest(presented, self._expected):
            raise HTTPException(HTTPStatus.UNAUTHORIZED, "send the internal token as Authorization: Bearer TOKEN")
