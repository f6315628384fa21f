"""Gathers the EngineSnapshot from the scheduler, on the engine's thread."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice

from vllm.v1.core.sched.scheduler import PauseState, Scheduler
from vllm.v1.request import Request

from coda_engine.contract.interface import FRONTIER_REQUESTS
from coda_engine.contract.reasons import Feature
from coda_engine.contract.snapshot import Capability, EngineSnapshot, StepCounters
from coda_engine.vllm_adapter.identity.table import IdentityTable
from coda_engine.vllm_adapter.scheduler.admission import StateAdmission
from coda_engine.vllm_adapter.scheduler.steps import StepObserver


@dataclass(frozen=True, slots=True)
class Digests:
    """What settings and profile the engine runs; ``profile`` is None without one."""

    settings: str
    profile: str | None


class SnapshotGatherer:
    """Reads the scheduler; changes nothing but the inspection cache.

    Attributes:
        served_models: Names under which requests may ask for the model.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        instance_id: str,
        identities: IdentityTable,
        steps: StepObserver,
        admission: StateAdmission | None,
        capabilities: Callable[[], dict[Feature, Capability]],
        digests: Callable[[], Digests],
        shutting_down: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._instance_id = instance_id
        self._identities = identities
        self._steps = steps
        self._admission = admission
        self._capabilities = capabilities
        self._digests = digests
        self._shutting_down = shutting_down
        self._clock = clock
        self._started_at_s = clock()
        names = scheduler.vllm_config.model_config.served_model_name
        self.served_models = [names] if isinstance(names, str) else list(names or ())

    def population(self) -> tuple[int, int]:
        """Return running and waiting requests."""
        counts: tuple[int, int] = self._scheduler.get_request_counts()
        return counts

    def gather(self) -> Callable[[int], bytes]:
        """Return the encoder of the state as it is now: snapshot version to JSON."""
        scheduler, now_s = self._scheduler, self._clock()
        running, waiting = list(scheduler.running), self._waiting()
        pool = scheduler.kv_cache_manager.block_pool
        digests = self._digests()
        decoding = [request for request in running if not request.is_prefill_chunk]
        snapshot = EngineSnapshot(
            instance_id=self._instance_id,
            version=0,
            published_at_s=now_s,
            started_at_s=self._started_at_s,
            draining=self._shutting_down() or scheduler.pause_state != PauseState.UNPAUSED,
            served_models=self.served_models,
            max_context_tokens=scheduler.max_model_len,
            max_running=scheduler.max_num_running_reqs,
            capabilities=self._capabilities(),
            settings_digest=digests.settings,
            profile_digest=digests.profile,
            waiting_by_tier=self._by_tier(waiting),
            running_by_tier=self._by_tier(running),
            requests_by_router=self._by_router(chain(running, waiting)),
            decode_context_tokens=[request.num_computed_tokens for request in decoding],
            pending_prefill_tokens=self._pending_prefill_tokens(running, waiting),
            oldest_ready_wait_ms=self._oldest_wait_ms(waiting, now_s * 1000.0),
            kv_blocks_total=pool.num_gpu_blocks - 1,
            kv_blocks_free=pool.get_num_free_blocks(),
            kv_block_tokens=scheduler.block_size,
            head_demand_blocks_by_tier=self._head_demand(waiting),
            steps=self._counters(),
        )
        return lambda version: snapshot.model_copy(
            update={"version": version, "published_at_s": self._clock()}
        ).to_json()

    def _waiting(self) -> list[Request]:
        return [*self._scheduler.waiting, *self._scheduler.kv_holding_waiting]

    def _tier(self, request: Request) -> int:
        return self._identities.get(request.request_id).tier

    def _by_tier(self, requests: Iterable[Request]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for request in requests:
            tier = self._tier(request)
            counts[tier] = counts.get(tier, 0) + 1
        return counts

    def _by_router(self, requests: Iterable[Request]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for request in requests:
            router_id = self._identities.get(request.request_id).router_id
            counts[router_id] = counts.get(router_id, 0) + 1
        return counts

    def _pending_prefill_tokens(self, running: list[Request], waiting: list[Request]) -> int:
        prefilling = sum(r.num_tokens - r.num_computed_tokens for r in running if r.is_prefill_chunk)
        return prefilling + sum(request.num_tokens - self._resident_tokens(request) for request in waiting)

    def _resident_tokens(self, request: Request) -> int:
        known = self._admission.inspector.resident_tokens(request) if self._admission is not None else 0
        return max(known, request.num_computed_tokens)

    def _oldest_wait_ms(self, waiting: list[Request], now_ms: float) -> float:
        return max((now_ms - ready_at_ms(request, self._identities) for request in waiting), default=0.0)

    def _head_demand(self, waiting: list[Request]) -> dict[int, int]:
        demand: dict[int, int] = {}
        if self._admission is None:
            return demand
        inspector = self._admission.inspector
        usable_blocks = inspector.capacity.usable_blocks()
        for request in islice(waiting, FRONTIER_REQUESTS):
            tier = self._tier(request)
            if tier not in demand and request.num_computed_tokens == 0:
                demand[tier] = inspector.inspect(request, usable_blocks).additional_kv_blocks
        return demand

    def _counters(self) -> StepCounters:
        steps, admission = self._steps, self._admission
        return StepCounters(
            pure_decode=steps.pure_decode,
            mixed=steps.mixed,
            prefill=steps.prefill,
            cohort_plans=dict(steps.cohort_plans),
            untrusted_identities=self._identities.untrusted,
            admissions=dict(admission.log.by_reason) if admission is not None else {},
            reordered=admission.log.reordered if admission is not None else 0,
            refused_after_feasible=admission.refused_after_feasible if admission is not None else 0,
        )


def ready_at_ms(request: Request, identities: IdentityTable) -> float:
    """Return when the request became logically ready, Unix milliseconds (its arrival here less its age then)."""
    ready: float = request.arrival_time * 1000.0 - identities.get(request.request_id).ready_age_ms
    return ready
