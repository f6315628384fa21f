"""What each scheduled step was made of, and how its decodes could have been grouped."""

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from coda_engine.policy.execution_admission import AttentionProfile, CompatibilityAware


class StepObserver:
    """Counts steps by kind and, when told to, the plans of pure-decode steps (mode Observe)."""

    def __init__(self) -> None:
        self.pure_decode = 0
        self.mixed = 0
        self.prefill = 0
        self.cohort_plans: dict[str, int] = {}
        self.planner: CompatibilityAware | None = None
        self.attention_profile: AttentionProfile | None = None

    def observe(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Count the step that ``output`` describes (called after its tokens were added to the requests)."""
        scheduled: dict[str, int] = output.num_scheduled_tokens
        if not scheduled:
            return
        contexts = []
        for request_id, tokens in scheduled.items():
            request = requests[request_id]
            if tokens == 1 and request.num_computed_tokens >= request.num_tokens:
                contexts.append(request.num_computed_tokens)
        if len(contexts) == len(scheduled):
            self.pure_decode += 1
            if self.planner is not None:
                reason = self.planner.plan(contexts, self.attention_profile).reason.value
                self.cohort_plans[reason] = self.cohort_plans.get(reason, 0) + 1
        elif contexts:
            self.mixed += 1
        else:
            self.prefill += 1
