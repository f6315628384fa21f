"""vLLM's endpoint plug-in: ``vllm.endpoint_plugins`` calls :func:`create` in the API process."""

import json
from argparse import Namespace
from typing import Any

from fastapi import FastAPI, HTTPException
from prometheus_client import REGISTRY

from coda_engine.contract.turns import TurnEnd
from coda_engine.policy.tool_use import ToolUse
from coda_engine.vllm_adapter.compat import check_replies, installed_version
from coda_engine.vllm_adapter.config import AdapterConfig, current
from coda_engine.vllm_adapter.http.metrics import EngineMetrics
from coda_engine.vllm_adapter.http.reader import PagesReader
from coda_engine.vllm_adapter.http.routes import build_router
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.plugin import APPLY_PROFILE, APPLY_SETTINGS, FORGET_HBM, SERVE_AS
from coda_engine.vllm_adapter.tools.reports import TURN_ENDED, watch_replies


class CodaEndpoints:
    """Serves ``/coda/...`` and adds ``coda_engine_*`` to vLLM's ``/metrics``.

    Attributes:
        name: The name to allow in ``VLLM_PLUGINS``.
        required_tasks: Only engines that generate have these endpoints.
    """

    name = "coda_http"
    required_tasks = ("generate",)

    def __init__(self, config: AdapterConfig) -> None:
        self._token = _token(config)
        self._reader = PagesReader(config.page_files)
        self._engine_client: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's application."""
        app.include_router(
            build_router(
                self._reader,
                self._token,
                self._apply_settings,
                self._apply_profile,
                self._forget_hbm,
                self._end_turn,
            )
        )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take the engine's client for the two endpoints that change the engine, and export metrics."""
        self._engine_client = engine_client
        await self._tell_names(args.served_model_name or [args.model])
        if engine_client is not None:
            call = engine_client.engine_core.call_utility_async
            await watch_replies(state, call, check_replies(installed_version()))
        REGISTRY.register(EngineMetrics(self._reader))

    async def _apply_settings(self, document: str) -> dict[str, str]:
        answer: dict[str, str] = await self._call(APPLY_SETTINGS, document)
        return answer

    async def _apply_profile(self, document: str) -> dict[str, str]:
        answer: dict[str, str] = await self._call(APPLY_PROFILE, document)
        return answer

    async def _tell_names(self, names: list[str]) -> None:
        try:
            await self._engine_client.engine_core.call_utility_async(SERVE_AS, names)
        except Exception as error:
            logger.warning("coda: the snapshot shows only the model's first name: %s", error)

    async def _forget_hbm(self) -> bool:
        answer: dict[str, bool] = await self._call(FORGET_HBM)
        return answer["forgotten"]

    async def _end_turn(self, turn: TurnEnd) -> None:
        uses = [ToolUse.of(tool.name, json.dumps({"command": tool.command})) for tool in turn.tools]
        await self._call(TURN_ENDED, turn.session_id, [[use.name, use.kind.value] for use in uses])

    async def _call(self, utility: str, *arguments: Any) -> Any:
        if self._engine_client is None:
            raise HTTPException(503, "the engine is starting")
        try:
            return await self._engine_client.engine_core.call_utility_async(utility, *arguments)
        except Exception as error:
            logger.warning("coda: %s failed: %s", utility, error)
            raise HTTPException(503, f"the engine could not do it: {error}") from error


def create() -> CodaEndpoints:
    """Return the plug-in, configured from the environment."""
    return CodaEndpoints(current())


def _token(config: AdapterConfig) -> str | None:
    """Return the internal token; "" (which nothing matches) when one is configured and unreadable."""
    file = config.internal_token
    return None if file.path is None else file.text or ""
