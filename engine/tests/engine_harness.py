"""A real vLLM engine in this process: model, worker and forward passes are real; plug-ins came by entry point."""

import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_harness import Trace
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from coda_engine.vllm_adapter.runtime import EngineRuntime

KV_BYTES = 220_000_000
STEP_TOKENS = 256
MAX_STEPS = 400


Script = Mapping[int, list[tuple[str, list[int], int]]]
"""Step to the requests that come before it: name, prompt, most tokens to generate."""


@contextmanager
def environment(values: Mapping[str, str]):
    """Set environment variables for the time of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class Run:
    """What a script of requests did: scheduled tokens step by step, first admissions, generated tokens."""

    trace: Trace = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)


class RealEngine:
    """One engine whose scheduler can be made anew, stock or with Coda, for each test."""

    def __init__(self, model_folder: Path) -> None:
        self.llm = LLM(
            model=str(model_folder),
            dtype="float32",  # several times as fast as bfloat16 on CPUs without AVX-512
            enforce_eager=True,
            block_size=32,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=8,
            max_model_len=4_096,
            kv_cache_memory_bytes=KV_BYTES,
            disable_log_stats=True,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.first_scheduler = self.core.scheduler

    @property
    def runtime(self) -> EngineRuntime:
        """Coda in the present scheduler."""
        return self.core.scheduler.coda_runtime

    def renew_scheduler(self, *, stock: bool = False) -> None:
        """Replace the scheduler by a new one as EngineCore builds it; ``stock`` leaves Coda out."""
        first = self.first_scheduler
        construct = Scheduler.__init__.__wrapped__ if stock else Scheduler.__init__
        scheduler = Scheduler.__new__(Scheduler)
        construct(
            scheduler,
            vllm_config=first.vllm_config,
            kv_cache_config=first.kv_cache_config,
            structured_output_manager=first.structured_output_manager,
            block_size=first.block_size,
            hash_block_size=first.hash_block_size,
            log_stats=first.log_stats,
        )
        self.core.scheduler = scheduler

    def run(
        self, script: Script, act: Callable[[int], None] | None = None, ages_s: Mapping[str, float] | None = None
    ) -> Run:
        """Run a script to its end; call ``act`` after each step; requests in ``ages_s`` arrived that long ago."""
        run, engine, scheduler = Run(), self.llm.llm_engine, self.core.scheduler
        schedule = scheduler.schedule

        def record(*args, **kwargs):
            output = schedule(*args, **kwargs)
            names = {name: name.rsplit("-", 1)[0] for name in output.num_scheduled_tokens}
            run.trace.append({names[name]: tokens for name, tokens in output.num_scheduled_tokens.items()})
            run.admitted.extend(names[data.req_id] for data in output.scheduled_new_reqs)
            return output

        scheduler.schedule = record
        try:
            for step in range(MAX_STEPS):
                for name, prompt, max_tokens in script.get(step, []):
                    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
                    arrival_s = time.time() - (ages_s or {}).get(name, 0.0)
                    engine.add_request(name, {"prompt_token_ids": prompt}, params, arrival_time=arrival_s)
                if not engine.has_unfinished_requests() and step > max(script):
                    return run
                for output in engine.step():
                    if output.finished:
                        run.finished.append(output.request_id)
                        run.outputs[output.request_id] = list(output.outputs[0].token_ids)
                if act is not None:
                    act(step)
        finally:
            scheduler.schedule = schedule
        raise AssertionError(f"unfinished after {MAX_STEPS} steps")


def tokens(seed: int, count: int) -> list[int]:
    """Return a random prompt."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(count)]
