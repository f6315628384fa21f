"""Telemetry of one engine: what it watches, which pages it writes, and how it ends when something in it fails."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.vllm_adapter.config import AdapterConfig
from coda_engine.vllm_adapter.scheduler.decisions import Decision
from coda_engine.vllm_adapter.scheduler.shadow_residency import ReadyKeys
from coda_engine.vllm_adapter.scheduler.shadow_tier import open_shadow
from coda_engine.vllm_adapter.scheduler.steps import StepObserver
from coda_engine.vllm_adapter.telemetry.beginnings import RequestBeginnings
from coda_engine.vllm_adapter.telemetry.board import Board
from coda_engine.vllm_adapter.telemetry.measures import MeasuresGatherer
from coda_engine.vllm_adapter.telemetry.observed import ObservedEngine
from coda_engine.vllm_adapter.telemetry.sessions import SessionTable
from coda_engine.vllm_adapter.telemetry.shadow_figures import ShadowReader
from coda_engine.vllm_adapter.telemetry.snapshot import SnapshotGatherer
from coda_engine.vllm_adapter.telemetry.startup import StartupCosts

_SESSION_HASHES_PER_BLOCK = 4


class Telemetry:
    """Told of steps and requests. No method raises: an error closes the feature and takes its pages back.

    Attributes:
        steps: Counts steps.
        sessions: The session table; None when nobody reads it or residency cannot be known.
        shutting_down: The engine takes no new requests.
    """

    def __init__(self, engine: ObservedEngine, config: AdapterConfig) -> None:
        self.steps = StepObserver()
        self.shutting_down = False
        self.sessions: SessionTable | None = None
        self._engine = engine
        self._scheduler = engine.scheduler
        self._costs = StartupCosts()
        self._beginnings: RequestBeginnings | None = RequestBeginnings(
            engine.scheduler, engine.identities, self._costs, tracing=self._can_trace()
        )
        self._gatherer: SnapshotGatherer | None = None
        self._board: Board | None = None
        self._guarded(lambda: self._build(config))

    # Told -----------------------------------------------------------------------------------------------

    def step_scheduled(self, output: SchedulerOutput, admitted: Sequence[Decision]) -> None:
        """Count the step that begins now, note who begins with it, and publish."""
        self._follow(lambda beginnings: beginnings.step_scheduled(output, admitted))
        self._guarded(lambda: self._observe(output))

    def step_finished(self) -> None:
        """Publish what the step left."""
        self._follow(RequestBeginnings.step_finished)
        self.publish(idle=not self._scheduler.has_unfinished_requests())

    def request_over(self, request: Request) -> None:
        """Keep what stays of a request: its session's residency and length."""
        self._follow(lambda beginnings: beginnings.request_over(request))
        key = self._engine.identities.get(request.request_id).session_key
        sessions = self.sessions
        if key and sessions is not None:
            self._guarded(lambda: sessions.used(key, request))

    def session_changed(self, key: str) -> None:
        """Note that a session waits for something else than before."""
        if self.sessions is not None:
            self.sessions.changed(key)

    def control_changed(self) -> None:
        """Publish other settings or another profile in force."""
        if self._board is not None:
            board = self._board
            self._guarded(lambda: board.publish_control(self._engine.control.encode(self._engine.instance_id)))

    def serve_as(self, names: list[str]) -> None:
        """Publish every name that the API process answers to; EngineCore itself knows only the first."""
        if self._gatherer is not None:
            self._gatherer.served_models = names
        self.publish(idle=True)

    def shutdown_requested(self) -> None:
        """Tell readers that the engine takes no new requests; it may still work through those that it has."""
        if not self.shutting_down:
            self.shutting_down = True
            self.publish(idle=True)

    def publish(self, *, idle: bool) -> None:
        """Publish what is due; everything when no step will follow."""
        board = self._board
        if board is not None:
            self._guarded(lambda: board.after_update(idle=idle))

    # Put together ---------------------------------------------------------------------------------------

    def _build(self, config: AdapterConfig) -> None:
        engine, feature = self._engine, Feature.SNAPSHOT
        if engine.capabilities.is_closed(feature):
            return
        if config.page_files is None:
            detail = f"no shared-memory pages in {config.page_dir}"
            engine.capabilities.close(feature, Reason.UNSUPPORTED_CONFIGURATION, detail)
            return
        shadow = ShadowReader(engine.scheduler)
        sessions = self._session_table(shadow.figures().capacity_pages)
        gatherer = SnapshotGatherer(engine, self.steps, shadow, lambda: self.shutting_down)
        measures = MeasuresGatherer(shadow, self._costs, engine.admission, engine.reclaim, sessions)
        decisions = engine.admission.log.encode if engine.admission is not None else None
        try:
            board = Board(
                config.page_files, gatherer, sessions, measures, decisions, self.fail,
                owned_here=config.owns_pages(os.getpid()),
            )  # fmt: skip
        except (OSError, ValueError) as error:
            engine.capabilities.close(feature, Reason.UNSUPPORTED_CONFIGURATION, f"{config.page_files}: {error}")
            return
        self.sessions, self._gatherer, self._board = sessions, gatherer, board
        engine.capabilities.set(feature, True, Reason.ENABLED)
        board.open(engine.control.encode(engine.instance_id))

    def _session_table(self, shadow_pages: int) -> SessionTable | None:
        engine = self._engine
        if engine.residency is None:
            return None
        hashes = _SESSION_HASHES_PER_BLOCK * engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        return SessionTable(
            engine.residency, engine.instance_id, engine.scheduler.block_size, hashes + shadow_pages,
            waits_for=engine.reclaim.gaps.waits_for if engine.reclaim is not None else None,
            shadow=self._shadow_keys,
        )  # fmt: skip

    def _shadow_keys(self) -> ReadyKeys | None:
        shadow = open_shadow(self._scheduler)
        return shadow.index if shadow is not None else None

    def _can_trace(self) -> bool:
        capabilities, feature = self._engine.capabilities, Feature.TRACE_ATTRIBUTES
        if capabilities.is_closed(feature):
            return False
        if self._scheduler.vllm_config.observability_config.otlp_traces_endpoint is None:
            capabilities.set(feature, False, Reason.DISABLED_BY_SETTINGS, "vLLM has no --otlp-traces-endpoint")
            return False
        capabilities.set(feature, True, Reason.ENABLED)
        return True

    # Fails closed ---------------------------------------------------------------------------------------

    def _observe(self, output: SchedulerOutput) -> None:
        self.steps.observe(output, self._scheduler.requests)
        if self._board is not None:
            self._board.after_schedule()

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self.fail(error)

    def _follow(self, action: Callable[[RequestBeginnings], None]) -> None:
        """Tell of a request's life; an error ends span attributes and startup costs, and nothing else."""
        if self._beginnings is None:
            return
        try:
            action(self._beginnings)
        except Exception as error:
            self._beginnings = None
            self._engine.capabilities.close_after_error(Feature.TRACE_ATTRIBUTES, error)

    def fail(self, error: Exception) -> None:
        """Close the feature after an error; readers see nothing rather than what nobody renews."""
        self._engine.capabilities.close_after_error(Feature.SNAPSHOT, error)
        board, self._board = self._board, None
        # Keep no table that nobody reads: only its publication lets go of what has left it.
        self.sessions = None
        if board is not None:
            board.withdraw()
