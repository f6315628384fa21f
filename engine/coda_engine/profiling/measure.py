"""The measurement: unique prompts on an otherwise idle engine, every size in every round."""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version

from coda_engine.contract.profile import FullKey, Profile, Provenance
from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.profiling.engine import EngineClient
from coda_engine.profiling.errors import EngineBusyError, EngineRequestError, MeasurementError
from coda_engine.profiling.fit import fit_prefill
from coda_engine.profiling.plan import FULL, PROBE_TOKENS, QUICK, MeasurementPlan, plan_measurement

Progress = Callable[[str], None]

_IDLE_WAIT_S = 60.0
_SETTLE_WAIT_S = 3.0
_POLL_S = 0.03
_DISTURBED_TRIES = 4
_WARM_UPS = 1

_WIDE_TOKEN_IDS = range(300, 30_000)
_NARROW_TOKEN_IDS = range(16, 240)  # for models with the smallest vocabularies


def measure_profile(client: EngineClient, *, quick: bool, progress: Progress) -> Profile:
    """Measure the engine behind ``client`` and return a validated artifact; nothing is delivered or written.

    Each prompt is random token ids that were never sent before, so that no prefix is reused, and is answered with one
    token. A sample during which the engine did anything else is thrown away and taken again.

    Args:
        client: A running engine that nobody else uses.
        quick: Fewer sizes and repetitions: about 12 s instead of minutes.
        progress: Gets a line for each round.

    Raises:
        EngineRequestError: The engine is not there or has no plug-ins.
        EngineBusyError: Others use the engine.
        MeasurementError: The curve does not grow, or does not predict its held-out points.
    """
    started_s = time.monotonic()
    effort = QUICK if quick else FULL
    bench = _Bench(client, client.full_key())
    progress("warming up")
    for _ in range(_WARM_UPS):
        bench.sample_ms(PROBE_TOKENS)
    plan = plan_measurement(bench.sample_ms(PROBE_TOKENS), bench.key.max_context_tokens, effort)
    samples: dict[int, list[float]] = defaultdict(list)
    for number in range(1, effort.rounds + effort.extra_rounds + 1):
        _measure_round(bench, plan, samples)
        elapsed_s = time.monotonic() - started_s
        progress(f"round {number} of {effort.rounds}: {plan.round_tokens} tokens, {elapsed_s:.0f} s so far")
        if number < effort.rounds:
            continue
        try:
            prefill = fit_prefill(plan, samples)
            break
        except MeasurementError as error:
            if number == effort.rounds + effort.extra_rounds:
                raise
            progress(f"once more: {error}")
    return Profile(
        full_key=bench.key,
        prefill=prefill,
        provenance=Provenance(
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=round(time.monotonic() - started_s, 1),
            coda_version=version("coda-serving"),
            quick=quick,
        ),
    )


def _measure_round(bench: "_Bench", plan: MeasurementPlan, samples: dict[int, list[float]]) -> None:
    """Add one sample of every size; sizes alternate so that a slow minute of the machine hits all alike."""
    for tokens in sorted((*plan.curve_tokens, *plan.held_out_tokens)):
        samples[tokens].append(bench.sample_ms(tokens))


class _Bench:
    """An engine under measurement."""

    def __init__(self, client: EngineClient, key: FullKey) -> None:
        self.client = client
        self.key = key
        self._model = client.model_name()
        self._random = random.Random()  # noqa: S311 - prompts must be new, not secret
        self._token_ids = _WIDE_TOKEN_IDS

    def sample_ms(self, tokens: int) -> float:
        """Return one undisturbed prefill time of ``tokens`` new tokens, milliseconds."""
        for _ in range(_DISTURBED_TRIES):
            before = self._idle_snapshot(_IDLE_WAIT_S)
            measured_ms = self._prefill_ms(tokens)
            after = self._settled_snapshot(before)
            if after is not None and not self._disturbed(before, after, tokens):
                return measured_ms
        raise EngineBusyError(
            f"other requests ran on {self.client.url} during each of {_DISTURBED_TRIES} measurements of {tokens} "
            "tokens; stop the traffic, or measure an engine of its own"
        )

    def _prefill_ms(self, tokens: int) -> float:
        try:
            return self.client.prefill_ms(self._model, self._prompt(tokens))
        except EngineRequestError as error:
            if error.status != 400 or self._token_ids is _NARROW_TOKEN_IDS:
                raise
            self._token_ids = _NARROW_TOKEN_IDS
            return self.client.prefill_ms(self._model, self._prompt(tokens))

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(self._token_ids, k=tokens)

    def _idle_snapshot(self, wait_s: float) -> EngineSnapshot:
        deadline_s = time.monotonic() + wait_s
        while True:
            snapshot = self.client.snapshot()
            if snapshot.running == 0 and snapshot.waiting == 0:
                return snapshot
            if time.monotonic() > deadline_s:
                raise EngineBusyError(
                    f"{self.client.url} has {snapshot.running} running and {snapshot.waiting} waiting requests since "
                    f"{wait_s:.0f} s; stop the traffic, or measure an engine of its own"
                )
            time.sleep(_POLL_S)

    def _settled_snapshot(self, before: EngineSnapshot) -> EngineSnapshot | None:
        """Return the idle snapshot that includes the sample's own steps; None when the engine stays busy."""
        deadline_s = time.monotonic() + _SETTLE_WAIT_S
        while time.monotonic() < deadline_s:
            snapshot = self.client.snapshot()
            own_steps_seen = snapshot.steps.prefill > before.steps.prefill
            if own_steps_seen and snapshot.running == 0 and snapshot.waiting == 0:
                return snapshot
            time.sleep(_POLL_S)
        return None

    def _disturbed(self, before: EngineSnapshot, after: EngineSnapshot, tokens: int) -> bool:
        """Say whether the engine did more than prefill this one prompt."""
        own_steps = math.ceil(tokens / self.key.max_batched_tokens)
        return (
            after.instance_id != before.instance_id
            or after.steps.mixed > before.steps.mixed
            or after.steps.pure_decode > before.steps.pure_decode
            or after.steps.prefill - before.steps.prefill > own_steps + 1
        )
