"""Tool-aware reclaim of one engine: told of requests and turns, it runs the victim window by the settings."""

import time
from collections.abc import Callable, Iterable, Sequence

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.settings import ReclaimPolicyName, ReclaimSettings
from coda_engine.policy.reclaim import CacheWise, FixedPrior, GapModel, Idleness, ToolAware, VictimOrder
from coda_engine.policy.tool_use import ToolUse
from coda_engine.vllm_adapter.capabilities import CapabilityVector
from coda_engine.vllm_adapter.identity.table import RequestIdentity
from coda_engine.vllm_adapter.reclaim.gaps import MAX_TOOLS, LearntGaps, SessionGaps
from coda_engine.vllm_adapter.reclaim.owners import BlockOwners
from coda_engine.vllm_adapter.reclaim.window import NATIVE, ReclaimPlan, VictimWindow
from coda_engine.vllm_adapter.scheduler.residency import pool_key
from coda_engine.vllm_adapter.scheduler.shadow_residency import shadow_key
from coda_engine.vllm_adapter.scheduler.shadow_tier import open_shadow

_PROBE = BlockHash(b"probe")


class Reclaim:
    """Follows sessions and their blocks; only the victim window changes anything.

    Attributes:
        gaps: What each session waits for.
        window: Chooses victims.
        tools_problem: Why no reply's tools are known; "" once they are; None while nobody has said.

    Args:
        scheduler: Of a configuration that ``scheduler.support`` supports.
        failed: Told of an error in a choice.
        clock: Monotonic, seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        manager = scheduler.kv_cache_manager
        self._chains = manager.coordinator.single_type_managers[0].req_to_blocks
        self.gaps = SessionGaps(clock)
        self._learnt = LearntGaps()
        self._owners = BlockOwners(manager.block_pool.num_gpu_blocks)
        self.window = VictimWindow(manager.block_pool, self._owners, self.gaps, self.published, failed, clock)
        self.tools_problem: str | None = None
        self._has_shadow = self.published() is not None

    @property
    def learnt_tools(self) -> int:
        """Tools whose gaps were learnt online."""
        return len(self._learnt)

    def stop(self) -> None:
        """Leave everything in native order from now on."""
        self.window.use(NATIVE)

    def request_arrived(self, request_id: str, identity: RequestIdentity) -> None:
        """Close the session's gap."""
        self.gaps.arrived(request_id, identity.session_key, identity.ready_age_ms / 1000.0)

    def step_scheduled(self, output: SchedulerOutput) -> bool:
        """Note which requests run for the first time; return whether the shadow has come or gone since last time."""
        for data in output.scheduled_new_reqs:
            self.gaps.started(data.req_id)
        had_shadow, self._has_shadow = self._has_shadow, self.published() is not None
        return had_shadow != self._has_shadow

    def request_over(self, request_id: str, session: str) -> None:
        """Claim the request's blocks for its session; they are still its own."""
        self._owners.claim(session, self._chains.get(request_id, ()))
        self.gaps.over(request_id)

    def turn_ended(self, session: str, uses: Iterable[Sequence[str]]) -> None:
        """Note the tools, as (name, kind), that a session's reply called."""
        tools = [ToolUse.told(name, kind) for name, kind in uses]
        self.gaps.turn_ended(session, tuple(tools[:MAX_TOOLS]))

    def published(self) -> Callable[[BlockHashWithGroupId], bool] | None:
        """Return the shadow's look-up; None while there is none, or if its keys are not the pool's."""
        shadow = open_shadow(self._scheduler)
        if shadow is None or shadow_key(_PROBE) != pool_key(_PROBE):
            return None
        return shadow.index.ready

    def use(self, settings: ReclaimSettings, capabilities: CapabilityVector) -> None:
        """Reclaim by ``settings`` from now on, as far as the engine has what they need, and say so."""
        feature = Feature.RECLAIM
        self.gaps.closed = self._learnt.learn if settings.learn_online else None
        self.window.use(NATIVE)
        if capabilities.is_closed(feature):
            return
        order = victim_order(settings, self._learnt if settings.learn_online else FixedPrior())
        if order is None or settings.window_blocks == 0:
            capabilities.set(feature, False, Reason.DISABLED_BY_SETTINGS, "vLLM's own order: least recently used")
            return
        problem = self._missing(order)
        if problem:
            capabilities.set(feature, False, Reason.NOT_AVAILABLE, problem)
            return
        self.window.use(ReclaimPlan(order, settings.window_blocks))
        capabilities.set(feature, True, Reason.ENABLED, settings.policy.value)

    def _missing(self, order: VictimOrder) -> str:
        """Return what the order needs and does not have, and the remedy; "" = nothing."""
        if order.needs_publication and self.published() is None:
            return "there is no CPU shadow, so no KV may be given up early; set spec.kvShadow.size"
        if order.needs_tools and self.tools_problem != "":
            return self.tools_problem or "no API process has said that it knows replies' tools"
        return ""


def victim_order(settings: ReclaimSettings, gaps: GapModel) -> VictimOrder | None:
    """Return the order that the settings name; None for vLLM's own."""
    match settings.policy:
        case ReclaimPolicyName.TOOL_AWARE:
            return ToolAware(gaps)
        case ReclaimPolicyName.CACHEWISE:
            return CacheWise(gaps)
        case ReclaimPolicyName.IDLENESS:
            return Idleness()
        case ReclaimPolicyName.LRU:
            return None


def unsupported_pool(scheduler: Scheduler) -> str:
    """Return what keeps the victim window from running on this engine, and the remedy; "" = nothing."""
    manager = scheduler.kv_cache_manager
    coordinator = manager.coordinator
    if not manager.enable_caching:
        return "prefix caching is off; remove --no-enable-prefix-caching"
    if (
        type(coordinator) is not UnitaryKVCacheCoordinator
        or type(coordinator.single_type_managers[0]) is not FullAttentionManager
    ):
        return "the model does not use full attention in every layer"
    return ""
