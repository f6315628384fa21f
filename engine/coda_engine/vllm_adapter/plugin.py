"""vLLM's entry into Coda: ``vllm.general_plugins`` calls :func:`register` in each of its processes.

The first process (the API server) makes the shared-memory pages and hands their name down by environment;
the hooks act wherever a scheduler is built (EngineCore) and lie idle elsewhere (workers).
"""

import atexit
import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest, output_processor
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request

from coda_engine.contract.reasons import Feature
from coda_engine.vllm_adapter.compat import Gate, check, installed_version
from coda_engine.vllm_adapter.config import ENV_PAGE_FILES, AdapterConfig, current
from coda_engine.vllm_adapter.hooking import is_hooked, mark_hooked
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.runtime import RUNTIME_ATTRIBUTE, EngineRuntime
from coda_engine.vllm_adapter.scheduler.hook import hook_construction
from coda_engine.vllm_adapter.shadow.injection import hook_configuration
from coda_engine.vllm_adapter.telemetry.page import PageFiles, page_path
from coda_engine.vllm_adapter.telemetry.pages import CAPACITIES, SNAPSHOT_PAGE
from coda_engine.vllm_adapter.tools.reports import TOOLS_SEEN, TURN_ENDED
from coda_engine.vllm_adapter.tracing.spans import hook_spans

APPLY_SETTINGS = "coda_apply_settings"
APPLY_PROFILE = "coda_apply_profile"
FORGET_HBM = "coda_forget_hbm"
SERVE_AS = "coda_serve_as"


def register() -> None:
    """Install Coda's hooks; whatever fails is logged and leaves vLLM as it is."""
    try:
        config = _with_pages(current())
        install(config, check(installed_version()))
    except Exception:
        logger.exception("coda is off: its plug-in could not be installed; vLLM serves without it")


def install(config: AdapterConfig, gates: Mapping[Feature, Gate]) -> None:
    """Hook Coda into vLLM's classes, once in a process, as far as the gates let it."""
    hook_construction(Scheduler, lambda scheduler: EngineRuntime.attach(scheduler, config, gates))
    if gates[Feature.KV_SHADOW].open:
        hook_configuration(EngineArgs, config.shadow)
    if gates[Feature.SNAPSHOT].open:
        _hook_shutdown(EngineCoreProc)
    if gates[Feature.IDENTITY].open:
        _hook_identity(EngineCore)
    if gates[Feature.LIVE_SETTINGS].open:
        _add_utilities(EngineCore)
    if gates[Feature.TRACE_ATTRIBUTES].open:
        hook_spans(output_processor)


def _with_pages(config: AdapterConfig) -> AdapterConfig:
    if config.page_files is not None and page_path(config.page_files, SNAPSHOT_PAGE).exists():
        return config
    config = replace(config, page_files=None)
    try:
        files = PageFiles.create(config.page_dir, CAPACITIES)
    except OSError as error:
        logger.warning("coda: no shared-memory pages in %s: %s", config.page_dir, error)
        return config
    atexit.register(files.remove)
    os.environ[ENV_PAGE_FILES] = str(files.prefix)
    return replace(config, page_files=files.prefix)


def _hook_identity(core_class: type[EngineCore]) -> None:
    original = core_class.preprocess_add_request
    if is_hooked(original):
        return

    @functools.wraps(original)
    def identify_and_preprocess(self: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        runtime: EngineRuntime | None = getattr(self.scheduler, RUNTIME_ATTRIBUTE, None)
        if runtime is not None:
            runtime.identify(request)
        preprocessed: tuple[Request, int] = original(self, request)
        return preprocessed

    mark_hooked(identify_and_preprocess)
    core_class.preprocess_add_request = identify_and_preprocess


def _hook_shutdown(process_class: type[EngineCoreProc]) -> None:
    original = process_class._handle_shutdown
    if is_hooked(original):
        return

    @functools.wraps(original)
    def handle_and_tell(self: EngineCoreProc) -> bool:
        goes_on: bool = original(self)
        if not self.is_running():
            runtime: EngineRuntime | None = getattr(self.scheduler, RUNTIME_ATTRIBUTE, None)
            if runtime is not None:
                runtime.shutdown_requested()
        return goes_on

    mark_hooked(handle_and_tell)
    process_class._handle_shutdown = handle_and_tell


def _add_utilities(core_class: type[EngineCore]) -> None:
    """Add the methods that the API process calls by ``call_utility_async`` (on the engine's thread)."""

    def apply_settings(self: EngineCore, document: str) -> dict[str, str]:
        return _runtime(self).apply_settings(document)

    def apply_profile(self: EngineCore, document: str) -> dict[str, str]:
        return _runtime(self).apply_profile(document)

    def forget_hbm(self: EngineCore) -> dict[str, bool]:
        return _runtime(self).forget_hbm()

    def serve_as(self: EngineCore, names: list[str]) -> None:
        _runtime(self).serve_as(names)

    def turn_ended(self: EngineCore, session_id: str, uses: list[list[str]]) -> None:
        _runtime(self).turn_ended(session_id, uses)

    def tools_seen(self: EngineCore, problem: str) -> None:
        _runtime(self).tools_seen(problem)

    setattr(core_class, TURN_ENDED, turn_ended)
    setattr(core_class, TOOLS_SEEN, tools_seen)
    setattr(core_class, SERVE_AS, serve_as)
    setattr(core_class, APPLY_SETTINGS, apply_settings)
    setattr(core_class, APPLY_PROFILE, apply_profile)
    setattr(core_class, FORGET_HBM, forget_hbm)


def _runtime(core: Any) -> EngineRuntime:
    runtime: EngineRuntime = getattr(core.scheduler, RUNTIME_ATTRIBUTE)
    return runtime
