"""What the capability vector says of the shadow."""

from vllm.v1.core.sched.scheduler import Scheduler

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.vllm_adapter.capabilities import CapabilityVector, Refusal
from coda_engine.vllm_adapter.config import ShadowConfig
from coda_engine.vllm_adapter.shadow.connector import CodaShadowConnector
from coda_engine.vllm_adapter.shadow.support import unsupported_configuration


def report_shadow(scheduler: Scheduler, config: ShadowConfig, capabilities: CapabilityVector) -> None:
    """Set the shadow's capability as the engine was built, and keep it set when the shadow closes later."""
    feature, connector = Feature.KV_SHADOW, scheduler.connector
    if isinstance(connector, CodaShadowConnector):
        manager = connector.manager
        if manager.index is None:
            refusal = manager.refusal or Refusal(Reason.INTERNAL_ERROR, "the shadow was shut down")
            capabilities.close(feature, refusal.reason, refusal.detail)
            return
        detail = f"{manager.index.statistics().capacity_pages} blocks in {config.folder}"
        capabilities.set(feature, True, Reason.ENABLED, detail)

        def closed(refusal: Refusal) -> None:
            capabilities.close(feature, refusal.reason, refusal.detail)

        manager.when_closed = closed
        return
    if config.problem:
        capabilities.close(feature, Reason.UNSUPPORTED_CONFIGURATION, config.problem)
    elif config.size_bytes <= 0:
        capabilities.close(feature, Reason.DISABLED_BY_SETTINGS, "spec.kvShadow.size is not set")
    else:
        problem = unsupported_configuration(scheduler.vllm_config) or "the engine was built without its connector"
        capabilities.close(feature, Reason.UNSUPPORTED_CONFIGURATION, problem)
