"""Gathers the EngineSnapshot from the scheduler, on the engine's thread."""

import time
from collections.abc import Callable, Iterable
from itertools import chain, islice

from vllm.v1.core.sched.scheduler import PauseState
from vllm.v1.request import Request

from coda_engine.contract.interface import FRONTIER_REQUESTS
from coda_engine.contract.snapshot import EngineSnapshot, Reservation, StepCounters
from coda_engine.vllm_adapter.scheduler.steps import StepObserver
from coda_engine.vllm_adapter.telemetry.observed import ObservedEngine
from coda_engine.vllm_adapter.telemetry.shadow_figures import ShadowFigures, ShadowReader


class SnapshotGatherer:
    """Reads the scheduler; changes nothing but the inspection cache.

    Attributes:
        served_models: Names under which requests may ask for the model.
    """

    def __init__(
        self,
        engine: ObservedEngine,
        steps: StepObserver,
        shadow: ShadowReader,
        shutting_down: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._identities = engine.identities
        self._admission = engine.admission
        self._steps = steps
        self._shadow = shadow
        self._shutting_down = shutting_down
        self._clock = clock
        self._started_at_s = clock()
        names = engine.scheduler.vllm_config.model_config.served_model_name
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
        digests, shadow = self._engine.control.digests(), self._shadow.figures()
        decoding = [request for request in running if not request.is_prefill_chunk]
        snapshot = EngineSnapshot(
            instance_id=self._engine.instance_id,
            version=0,
            published_at_s=now_s,
            started_at_s=self._started_at_s,
            draining=self._shutting_down() or scheduler.pause_state != PauseState.UNPAUSED,
            served_models=self.served_models,
            max_context_tokens=scheduler.max_model_len,
            max_running=scheduler.max_num_running_reqs,
            capabilities=self._engine.capabilities.snapshot(),
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
            reservation=self._reservation(now_s * 1000.0),
            shadow_bytes_used=shadow.used_bytes,
            shadow_bytes_capacity=shadow.capacity_bytes,
            outstanding_restore_bytes=shadow.outstanding_restore_bytes,
            steps=self._counters(shadow),
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
        return prefilling + sum(request.num_tokens - self._reusable_tokens(request) for request in waiting)

    def _reusable_tokens(self, request: Request) -> int:
        computed: int = request.num_computed_tokens
        if self._admission is None or computed:
            return computed
        inspector = self._admission.inspector
        return inspector.resident_tokens(request) + inspector.restorable_tokens(request)

    def _oldest_wait_ms(self, waiting: list[Request], now_ms: float) -> float:
        return max((now_ms - self._identities.ready_at_ms(request) for request in waiting), default=0.0)

    def _head_demand(self, waiting: list[Request]) -> dict[int, int]:
        demand: dict[int, int] = {}
        if self._admission is None:
            return demand
        inspector = self._admission.inspector
        room = inspector.capacity.room()
        for request in islice(waiting, FRONTIER_REQUESTS):
            tier = self._tier(request)
            if tier not in demand and request.num_computed_tokens == 0:
                demand[tier] = inspector.inspect(request, room).additional_kv_blocks
        return demand

    def _reservation(self, now_ms: float) -> Reservation | None:
        request = self._admission.reserved_for if self._admission is not None else None
        if self._admission is None or request is None:
            return None
        inspector = self._admission.inspector
        return Reservation(
            tier=self._tier(request),
            wait_ms=now_ms - self._identities.ready_at_ms(request),
            kv_blocks=inspector.inspect(request, inspector.capacity.room()).additional_kv_blocks,
        )

    def _counters(self, shadow: ShadowFigures) -> StepCounters:
        steps, reclaim = self._steps, self._engine.reclaim
        log = self._admission.log if self._admission is not None else None
        return StepCounters(
            pure_decode=steps.pure_decode,
            mixed=steps.mixed,
            prefill=steps.prefill,
            cohort_plans=dict(steps.cohort_plans),
            untrusted_identities=self._identities.untrusted,
            reclaimed=dict(reclaim.window.victims) if reclaim is not None else {},
            admissions=dict(log.by_reason) if log is not None else {},
            admissions_by_path=dict(log.by_path) if log is not None else {},
            admitted_tokens=dict(log.tokens_by_path) if log is not None else {},
            reordered=log.reordered if log is not None else 0,
            refused_after_feasible=self._admission.refused_after_feasible if self._admission is not None else 0,
            shadow_pages=shadow.events,
            failed_restores=shadow.counters.failed_loads,
        )
