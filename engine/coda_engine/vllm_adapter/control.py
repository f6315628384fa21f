"""Settings and profile in force, and what they make of each admission feature."""

import json
from dataclasses import dataclass, field

from coda_engine.contract.errors import DocumentError, ProfileRefusedError
from coda_engine.contract.profile import MAX_PROFILE_BYTES, FullKey, Profile
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.settings import ExecutionAdmissionMode, Settings, StateAdmissionPolicyName
from coda_engine.policy.cost import cost_model
from coda_engine.policy.execution_admission import CompatibilityAware
from coda_engine.policy.selection import execution_admission_policy, state_admission_policy
from coda_engine.policy.state_admission import Fifo
from coda_engine.vllm_adapter.capabilities import CapabilityVector, Refusal
from coda_engine.vllm_adapter.config import FileText
from coda_engine.vllm_adapter.scheduler.admission import AdmissionPlan
from coda_engine.vllm_adapter.telemetry.pages import ControlDocument


@dataclass(frozen=True, slots=True)
class Digests:
    """What settings and profile the engine runs; ``profile`` is None without one."""

    settings: str
    profile: str | None


@dataclass(slots=True)
class Control:
    """The engine's settings and profile; changed only on the engine's thread.

    Attributes:
        full_key: The key that a profile must carry.
        settings: In force.
        profile: In force; None without one.
        settings_problem: Why the settings file could not be used; "" once settings are known.
        profile_refusal: Why there is no profile; None with one.
    """

    full_key: FullKey
    settings: Settings = field(default_factory=Settings)
    profile: Profile | None = None
    settings_problem: str = ""
    profile_refusal: Refusal | None = None

    def load_settings(self, file: FileText) -> None:
        """Take the settings to start with; unreadable ones are kept as a problem, not guessed."""
        if file.path is None:
            return
        if file.text is None:
            self.settings_problem = file.problem
            return
        try:
            self.settings = Settings.parse(file.text)
        except DocumentError as error:
            self.settings_problem = f"{file.path}: {error}"

    def load_profile(self, file: FileText) -> None:
        """Take the profile to start with, if it is this engine's."""
        if file.text is None:
            unreadable = bool(file.problem) and not file.missing
            reason = Reason.PROFILE_UNREADABLE if unreadable else Reason.NO_PROFILE
            self.profile_refusal = Refusal(reason, file.problem or "no profile is configured; measure one")
            return
        try:
            self.use_profile(parse_profile(file.text))
        except DocumentError as error:
            self.profile_refusal = Refusal(Reason.PROFILE_UNREADABLE, f"{file.path}: {error}")
        except ProfileRefusedError as error:
            self.profile_refusal = Refusal(error.reason, f"{file.path}: {error.detail}")

    def use_settings(self, settings: Settings) -> None:
        """Put ``settings`` in force."""
        self.settings, self.settings_problem = settings, ""

    def use_profile(self, profile: Profile) -> None:
        """Put ``profile`` in force.

        Raises:
            ProfileRefusedError: It is not this engine's; the one in force stays.
        """
        profile.require_match(self.full_key)
        self.profile, self.profile_refusal = profile, None

    def digests(self) -> Digests:
        """Return the digests of what is in force."""
        return Digests(self.settings.digest(), self.profile.digest() if self.profile is not None else None)

    def encode(self, instance_id: str) -> bytes:
        """Return the :class:`ControlDocument` of this engine as JSON."""
        digests = self.digests()
        document = ControlDocument(
            instance_id=instance_id,
            spec_key_digest=self.full_key.spec.digest(),
            full_key=self.full_key.model_dump(mode="json"),
            settings_digest=digests.settings,
            settings=self.settings.model_dump(mode="json", by_alias=True),
            profile_digest=digests.profile,
            profile=self.profile.model_dump(mode="json") if self.profile is not None else None,
        )
        return json.dumps(document, separators=(",", ":")).encode()

    def admission_plan(self, capabilities: CapabilityVector) -> AdmissionPlan:
        """Return the state-admission plan and set the feature's capability to match."""
        feature, settings = Feature.STATE_ADMISSION, self.settings.admission.state
        if capabilities.is_closed(feature):
            return AdmissionPlan()
        if self.settings_problem:
            capabilities.set(feature, False, Reason.UNSUPPORTED_CONFIGURATION, self.settings_problem)
            return AdmissionPlan()
        if settings.policy is StateAdmissionPolicyName.FIFO:
            capabilities.set(feature, False, Reason.DISABLED_BY_SETTINGS, "the policy is fifo, vLLM's own order")
            return AdmissionPlan(policy=Fifo(), frontier=settings.frontier)
        if self.profile is None:
            refusal = self.profile_refusal or Refusal(Reason.NO_PROFILE, "")
            capabilities.set(feature, False, refusal.reason, refusal.detail)
            return AdmissionPlan()
        capabilities.set(feature, True, *self._enabled_because(settings.policy))
        # tiered-aging is the paper to the letter, and its prefill curve knows no context.
        by_context = settings.policy is not StateAdmissionPolicyName.TIERED_AGING
        cost = cost_model(self.profile, by_context=by_context)
        return AdmissionPlan(state_admission_policy(settings), cost, settings.frontier)

    def _enabled_because(self, policy: StateAdmissionPolicyName) -> tuple[Reason, str]:
        """Return the reason and detail of an admission that is on: by the policy, or on costs that want a check."""
        outdated = self.outdated_profile()
        if not outdated:
            return Reason.ENABLED, policy.value
        return Reason.PROFILE_NEEDS_REVALIDATION, f"{policy.value}; {outdated}"

    def outdated_profile(self) -> str:
        """Return which soft fields of the profile's key differ and what to do; "" when none does or there is none."""
        differences = self.profile.soft_mismatches(self.full_key) if self.profile is not None else []
        if not differences:
            return ""
        return (
            f"the profile was measured under other versions (engine != profile): {'; '.join(differences)}; check its "
            "held-out points again: coda profile --engine URL --out FILE --apply"
        )

    def cohort_planner(self, capabilities: CapabilityVector) -> CompatibilityAware | None:
        """Return the planner of pure-decode steps, None when disabled, and set the feature's capability."""
        feature, settings = Feature.EXECUTION_ADMISSION, self.settings.admission.execution
        if capabilities.is_closed(feature):
            return None
        if settings.mode is ExecutionAdmissionMode.DISABLED:
            capabilities.set(feature, False, Reason.DISABLED_BY_SETTINGS)
            return None
        capabilities.set(feature, False, Reason.OBSERVING, "steps are planned and counted, not split")
        return execution_admission_policy(settings)


def parse_profile(text: str) -> Profile:
    """Return the profile in ``text``.

    Raises:
        DocumentError: Too large, not JSON, or a field does not fit.
    """
    if len(text.encode()) > MAX_PROFILE_BYTES:
        raise DocumentError(f"a profile is at most {MAX_PROFILE_BYTES} bytes; this one has {len(text.encode())}")
    return Profile.from_json(text)
