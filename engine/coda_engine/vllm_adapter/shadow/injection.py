"""Gives an engine its shadow: the connector is written into the configuration that vLLM has resolved.

After vLLM has resolved and checked it, not before: a combination that vLLM refuses would end the engine,
here it only keeps the shadow off.
"""

import functools
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from coda_engine.vllm_adapter.config import ShadowConfig
from coda_engine.vllm_adapter.hooking import is_hooked, mark_hooked
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.shadow.layout import PLAN_FIELD, ShadowPlan, configured_identity
from coda_engine.vllm_adapter.shadow.support import unsupported_configuration

CONNECTOR = "CodaShadowConnector"


def hook_configuration(arguments_class: type[EngineArgs], config: ShadowConfig) -> None:
    """Configure the shadow in every engine whose arguments this process resolves."""
    original = arguments_class.create_engine_config
    if is_hooked(original):
        return

    @functools.wraps(original)
    def create_and_configure(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        resolved = original(self, *args, **kwargs)
        try:
            configure(resolved, config)
        except Exception:
            resolved.kv_transfer_config = self.kv_transfer_config
            logger.exception("coda KVShadow is off: it could not be configured")
        return resolved

    mark_hooked(create_and_configure)
    arguments_class.create_engine_config = create_and_configure


def configure(resolved: VllmConfig, config: ShadowConfig) -> None:
    """Write the shadow's connector into ``resolved`` where one is wanted and supported."""
    if config.size_bytes <= 0:
        return
    problem = unsupported_configuration(resolved)
    if problem:
        logger.warning("coda KVShadow is off: %s", problem)
        return
    plan = ShadowPlan(str(config.folder), config.size_bytes, config.eviction, configured_identity(resolved))
    resolved.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path="coda_engine.vllm_adapter.shadow.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "ShadowSpec",
            "spec_module_path": "coda_engine.vllm_adapter.shadow.spec",
            "offload_prompt_only": False,
            PLAN_FIELD: plan.to_field(),
        },
    )
