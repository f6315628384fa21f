"""One engine's Coda: what the hooks share, put together when vLLM has built its scheduler."""

import os
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from coda_engine.contract.errors import DocumentError, ProfileRefusedError
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.settings import Settings
from coda_engine.policy.execution_admission import CompatibilityAware
from coda_engine.vllm_adapter.capabilities import CapabilityVector
from coda_engine.vllm_adapter.compat import Gate
from coda_engine.vllm_adapter.config import AdapterConfig
from coda_engine.vllm_adapter.control import Control, parse_profile
from coda_engine.vllm_adapter.identity.hook import IdentityRules
from coda_engine.vllm_adapter.identity.table import IdentityTable
from coda_engine.vllm_adapter.keys import full_key_or_derived
from coda_engine.vllm_adapter.kv_facts import kv_facts
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.reclaim.reclaim import Reclaim, unsupported_pool
from coda_engine.vllm_adapter.scheduler.admission import StateAdmission
from coda_engine.vllm_adapter.scheduler.decisions import Decision
from coda_engine.vllm_adapter.scheduler.hook import hook_steps
from coda_engine.vllm_adapter.scheduler.queue import FrontierQueue
from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex
from coda_engine.vllm_adapter.scheduler.support import unsupported_configuration
from coda_engine.vllm_adapter.shadow.capability import report_shadow
from coda_engine.vllm_adapter.telemetry.observed import ObservedEngine
from coda_engine.vllm_adapter.telemetry.telemetry import Telemetry

RUNTIME_ATTRIBUTE = "coda_runtime"
"""Attribute of vLLM's scheduler under which the identity hook and the engine utilities find the runtime."""

_Part = TypeVar("_Part")


class EngineRuntime:
    """Listens to the scheduler's steps; owns every part of Coda inside EngineCore.

    Every method that vLLM calls catches what goes wrong, switches the feature concerned off with its reason
    and lets vLLM go on: an exception here would end the engine.
    """

    def __init__(self, scheduler: Scheduler, config: AdapterConfig, gates: Mapping[Feature, Gate]) -> None:
        self.capabilities = CapabilityVector()
        for feature, gate in gates.items():
            if not gate.open:
                self.capabilities.close(feature, gate.reason, gate.detail)
        self.instance_id = uuid.uuid4().hex
        self.identities = IdentityTable()
        self._scheduler = scheduler
        self._identity_rules = self._build_identity_rules(config)
        key, key_problem = full_key_or_derived(scheduler.vllm_config, config.spec_key, kv_facts(scheduler))
        self.control = Control(key)
        self.control.load_settings(config.settings)
        self.control.load_profile(config.profile)
        for problem in (key_problem, config.isolation_problem, config.internal_token.problem):
            if problem:
                logger.warning("coda: %s", problem)
        self.admission: StateAdmission | None = None
        self._queue: FrontierQueue | None = None
        self._residency: ResidencyIndex | None = None
        self.reclaim = self._attempt(Feature.RECLAIM, self._build_reclaim)
        self._attempt(Feature.STATE_ADMISSION, self._build_admission)
        self.capabilities.set(Feature.LIVE_SETTINGS, True, Reason.ENABLED)
        self._attempt(Feature.KV_SHADOW, lambda: report_shadow(scheduler, config.shadow, self.capabilities))
        planner = self._apply_control()
        self.telemetry = Telemetry(
            ObservedEngine(
                scheduler, self.instance_id, self.identities, self.capabilities, self.control, self.admission,
                self._residency, self.reclaim,
            ),
            config,
        )  # fmt: skip
        self.telemetry.steps.planner = planner

    @classmethod
    def attach(cls, scheduler: Scheduler, config: AdapterConfig, gates: Mapping[Feature, Gate]) -> "EngineRuntime":
        """Return the runtime of ``scheduler``, hooked into it and publishing."""
        runtime = cls(scheduler, config, gates)
        setattr(scheduler, RUNTIME_ATTRIBUTE, runtime)
        try:
            hook_steps(scheduler, runtime)
        except Exception as error:
            # Identity goes on: without it tenants would not be kept apart.
            runtime._admission_failed(error)
            runtime._reclaim_failed(error)
            runtime.telemetry.fail(error)
        return runtime

    # Told by the hooks ----------------------------------------------------------------------------------

    def identify(self, request: EngineCoreRequest) -> None:
        """Override what the request says about itself (input thread)."""
        if self.capabilities.is_closed(Feature.IDENTITY):
            return
        try:
            self._identity_rules.apply(request, self.identities)
        except Exception:
            # Closed, not open: who cannot be identified must not reach a tenant's prefixes; others are not affected.
            logger.exception("coda Identity: a request could not be identified and is not trusted")
            self._identity_rules.distrust(request, self.identities)

    def request_arrived(self, request: Request) -> None:
        """Close the gap of the request's session."""
        if self.reclaim is None:
            return
        try:
            identity = self.identities.get(request.request_id)
            self.reclaim.request_arrived(request.request_id, identity)
            self.telemetry.session_changed(identity.session_key)
        except Exception as error:
            self._reclaim_failed(error)

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """Count the step, close its admission decisions and publish."""
        try:
            if self.reclaim is not None and self.reclaim.step_scheduled(output):
                self.reclaim.use(self.control.settings.admission.reclaim, self.capabilities)
        except Exception as error:
            self._reclaim_failed(error)
        admitted: list[Decision] = []
        try:
            if self.admission is not None and self._queue is not None:
                admitted = self.admission.end_step(self._queue, output.num_scheduled_tokens)
        except Exception as error:
            self._admission_failed(error)
        self.telemetry.step_scheduled(output, admitted)

    def step_finished(self) -> None:
        """Publish what the step left."""
        self.telemetry.step_finished()

    def request_over(self, request: Request) -> None:
        """Keep the session's residency and its blocks' owner, forget the request's identity."""
        try:
            if self.reclaim is not None:
                key = self.identities.get(request.request_id).session_key
                self.reclaim.request_over(request.request_id, key)
        except Exception as error:
            self._reclaim_failed(error)
        self.telemetry.request_over(request)
        self.identities.drop(request.request_id)
        try:
            if self.admission is not None:
                self.admission.inspector.forget((request,))
        except Exception as error:
            self._admission_failed(error)

    def shutdown_requested(self) -> None:
        """Tell readers that the engine takes no new requests; it may still work through those that it has."""
        self.telemetry.shutdown_requested()

    # Called as engine utilities -------------------------------------------------------------------------

    def apply_settings(self, document: str) -> dict[str, str]:
        """Put a settings document in force; return its digest, or ``error``."""
        try:
            self.control.use_settings(Settings.parse(document))
        except DocumentError as error:
            return {"error": str(error)}
        self._control_changed()
        return {"digest": self.control.settings.digest()}

    def apply_profile(self, document: str) -> dict[str, str]:
        """Put a profile in force.

        Returns:
            Its digest and, in ``detail``, why it wants re-validation ("" = it does not); or ``error``; or the
            refusal's ``reason`` and ``detail``.
        """
        try:
            profile = parse_profile(document)
            self.control.use_profile(profile)
        except DocumentError as error:
            return {"error": str(error)}
        except ProfileRefusedError as error:
            return {"reason": error.reason.value, "detail": error.detail}
        self._control_changed()
        return {"digest": profile.digest(), "detail": self.control.outdated_profile()}

    def forget_hbm(self) -> dict[str, bool]:
        """Forget the KV cached in HBM, if the engine is idle; the shadow keeps its copies. Returns ``forgotten``."""
        if self._scheduler.has_unfinished_requests():
            return {"forgotten": False}
        return {"forgotten": bool(self._scheduler.kv_cache_manager.reset_prefix_cache())}

    def turn_ended(self, session_id: str, uses: list[list[str]]) -> None:
        """Note which tools, as [name, kind], a session's reply called; believed like the request's own identity."""
        if self.reclaim is None:
            return
        try:
            key = self._identity_rules.session_key(session_id)
            self.reclaim.turn_ended(key, uses)
            if self.reclaim.tools_problem != "":
                # Whoever tells of turns sees tools, be it this engine's API process or somebody outside.
                self.tools_seen("")
            self.telemetry.session_changed(key)
            if not self._scheduler.has_unfinished_requests():
                self.telemetry.publish(idle=True)
        except Exception as error:
            self._reclaim_failed(error)

    def tools_seen(self, problem: str) -> None:
        """Note that the API process sees replies' tools, or why it does not."""
        if self.reclaim is not None:
            self.reclaim.tools_problem = problem
            self.reclaim.use(self.control.settings.admission.reclaim, self.capabilities)
            self.telemetry.publish(idle=not self._scheduler.has_unfinished_requests())

    def serve_as(self, names: list[str]) -> None:
        """Publish every name that the API process answers to; EngineCore itself knows only the first."""
        self.telemetry.serve_as(names)

    # Put together ---------------------------------------------------------------------------------------

    def _attempt(self, feature: Feature, build: Callable[[], _Part]) -> _Part | None:
        """Return what ``build`` makes; an error in it closes its feature and no other."""
        try:
            return build()
        except Exception as error:
            self.capabilities.close_after_error(feature, error)
            return None

    def _build_identity_rules(self, config: AdapterConfig) -> IdentityRules:
        file = config.cluster_secret
        if file.text is not None:
            self.capabilities.set(Feature.IDENTITY, True, Reason.ENABLED, f"isolation {config.isolation.value}")
            return IdentityRules(file.text.encode(), config.isolation)
        if file.path is None:
            detail = "no cluster secret is configured: session ids are taken as they are"
            self.capabilities.set(Feature.IDENTITY, False, Reason.NO_CLUSTER_SECRET, detail)
            return IdentityRules(None, config.isolation)
        # A secret was meant to be here: nobody can prove anything without it, so everybody is untrusted.
        detail = f"{file.problem}: every request is untrusted"
        self.capabilities.set(Feature.IDENTITY, False, Reason.NO_CLUSTER_SECRET, detail)
        return IdentityRules(os.urandom(32), config.isolation)

    def _build_admission(self) -> None:
        scheduler, feature = self._scheduler, Feature.STATE_ADMISSION
        if self.capabilities.is_closed(feature):
            return
        problem = unsupported_configuration(scheduler)
        if problem:
            self.capabilities.close(feature, Reason.UNSUPPORTED_CONFIGURATION, problem)
            return
        pool = scheduler.kv_cache_manager.block_pool
        index = ResidencyIndex(pool)
        admission = StateAdmission(scheduler, index, self.identities.ready_at_ms, self._admission_failed)
        queue = FrontierQueue(admission, scheduler.waiting)
        index.install()
        scheduler.waiting = queue
        self.admission, self._queue, self._residency = admission, queue, index

    def _build_reclaim(self) -> Reclaim | None:
        feature = Feature.RECLAIM
        if self.capabilities.is_closed(feature):
            return None
        problem = unsupported_pool(self._scheduler)
        if problem:
            self.capabilities.close(feature, Reason.UNSUPPORTED_CONFIGURATION, problem)
            return None
        reclaim = Reclaim(self._scheduler, self._reclaim_failed)
        reclaim.window.install()
        return reclaim

    # Kept consistent ------------------------------------------------------------------------------------

    def _apply_control(self) -> CompatibilityAware | None:
        """Put settings and profile in force; return the planner of pure-decode steps."""
        plan = self.control.admission_plan(self.capabilities)
        if self.admission is not None:
            self.admission.use(plan)
        if self._queue is not None:
            self._queue.reconsider()
        if self.reclaim is not None:
            self.reclaim.use(self.control.settings.admission.reclaim, self.capabilities)
        return self.control.cohort_planner(self.capabilities)

    def _control_changed(self) -> None:
        self.telemetry.steps.planner = self._apply_control()
        self.telemetry.control_changed()

    def _admission_failed(self, error: Exception) -> None:
        self.capabilities.close_after_error(Feature.STATE_ADMISSION, error)
        if self.admission is not None:
            self.admission.stop()

    def _reclaim_failed(self, error: Exception) -> None:
        self.capabilities.close_after_error(Feature.RECLAIM, error)
        if self.reclaim is not None:
            self.reclaim.stop()
