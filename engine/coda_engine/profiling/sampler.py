"""One sample at a time from an otherwise idle engine; what was disturbed is thrown away and taken again."""

import math
import random
import time
from collections.abc import Callable, Sequence

from coda_engine.contract.profile import FullKey
from coda_engine.contract.reasons import Feature
from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.profiling.engine import EngineClient, FirstToken
from coda_engine.profiling.errors import EngineBusyError, EngineRequestError, MeasurementError
from coda_engine.profiling.plan import PROBE_TOKENS, EngineLimits, Part, Spot

IDLE_WAIT_S = 60.0
SETTLE_WAIT_S = 3.0
POLL_S = 0.03
TRIES = 4

_WIDE_TOKEN_IDS = range(300, 30_000)
_NARROW_TOKEN_IDS = range(16, 240)  # for models with the smallest vocabularies


class Sampler:
    """An engine under measurement.

    Prompts are random token ids that were never sent before, so that nothing is reused but what is meant to be:
    contexts and restores begin with a prompt that this sampler has sent whole. Every answer says how many of its
    tokens were reused; another number than meant is a disturbance.

    Attributes:
        client: The engine.
        key: The engine's own full key.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.key: FullKey = client.full_key()
        self._model = client.model_name()
        self._random = random.Random()  # noqa: S311 - prompts must be new, not secret
        self._token_ids = _WIDE_TOKEN_IDS
        self._sent: list[list[int]] = []

    def limits(self) -> EngineLimits:
        """Return what the engine can be asked for."""
        snapshot = self.client.snapshot()
        shadow = snapshot.capabilities.get(Feature.KV_SHADOW)
        has_shadow = shadow is not None and shadow.enabled and self.key.kv_block_bytes > 0
        shadow_blocks = snapshot.shadow_bytes_capacity // self.key.kv_block_bytes if has_shadow else 0
        return EngineLimits(
            context_tokens=self.key.max_context_tokens,
            block_tokens=self.key.block_size,
            kv_tokens=snapshot.kv_blocks_total * self.key.block_size or self.key.max_context_tokens,
            shadow_tokens=shadow_blocks * self.key.block_size,
        )

    def probe_ms(self) -> float:
        """Return the time of a warm prefill of a fixed size, milliseconds; finds out which token ids there are."""
        spot = Spot(Part.PREFILL, PROBE_TOKENS)
        try:
            self.sample_ms(spot)
        except EngineRequestError as error:
            if error.status != 400:
                raise
            self._token_ids = _NARROW_TOKEN_IDS
            self.sample_ms(spot)
        return self.sample_ms(spot)

    def begin_round(self) -> None:
        """Forget earlier prompts, so that contexts and restores use those that are sent from now on."""
        self._sent.clear()

    def sample_ms(self, spot: Spot) -> float:
        """Return one undisturbed sample of ``spot``, milliseconds; of a restore: restored less HBM hit.

        Raises:
            EngineBusyError: Others use the engine.
            EngineRequestError: The engine is gone or refuses.
            MeasurementError: What is to be reused is not there.
        """
        match spot.part:
            case Part.PREFILL:
                return self._undisturbed(spot, lambda: self._new_ms(spot))
            case Part.GRID:
                return self._undisturbed(spot, lambda: self._after_context_ms(spot))
            case Part.RESTORE:
                return self._undisturbed(spot, lambda: self._restore_ms(spot))

    def _undisturbed(self, spot: Spot, sample: Callable[[], float | None]) -> float:
        missed = 0
        for _ in range(TRIES):
            before = self._idle_snapshot()
            measured_ms = sample()
            after = self._settled_snapshot(before)
            if measured_ms is None:
                missed += 1
            elif after is not None and not self._disturbed(before, after, spot):
                return measured_ms
        if missed == TRIES:
            raise MeasurementError(f"{spot.part}: {spot}: {_MISSING[spot.part]}")
        raise EngineBusyError(
            f"other requests ran on {self.client.url} during each of {TRIES} measurements of {spot}; stop the "
            "traffic, or measure an engine of its own"
        )

    def _new_ms(self, spot: Spot) -> float | None:
        prompt = self._prompt(spot.tokens)
        answer = self._ask([prompt])[-1]
        self._sent.append(prompt)
        return answer.ms if not answer.cached_tokens else None

    def _after_context_ms(self, spot: Spot) -> float | None:
        """Return the first token's time of new tokens after a context in HBM; None when it was not there (yet)."""
        context = self._known(spot.context_tokens, 1)[0]
        answer = self._ask([[*context, *self._prompt(spot.tokens)]])[-1]
        return answer.ms if self._reused(answer, spot.context_tokens) else None

    def _restore_ms(self, spot: Spot) -> float | None:
        """Return how much later the first token comes when prompts are restored; None when they were not all.

        The same requests are sent twice: with nothing in HBM, then with everything. Each ends with a few new
        tokens, less than a block, since an engine always computes at least the last one.
        """
        known = self._known(spot.tokens, spot.outstanding + 1)
        self._forget_hbm()
        restored = self._ask([[*prompt, *self._few_new()] for prompt in known])
        self._idle_snapshot()
        hits = self._ask([[*prompt, *self._few_new()] for prompt in known])
        if not all(self._reused(answer, spot.tokens) for answer in (*restored, *hits)):
            return None
        return restored[-1].ms - hits[-1].ms

    def _known(self, tokens: int, count: int) -> list[list[int]]:
        """Return the first ``tokens`` tokens of ``count`` prompts that were sent whole; send what is missing."""
        self._sent.sort(key=len, reverse=True)
        while sum(len(prompt) >= tokens for prompt in self._sent) < count:
            prompt = self._prompt(tokens)
            self._ask([prompt])
            self._sent.append(prompt)
            self._sent.sort(key=len, reverse=True)
        return [prompt[:tokens] for prompt in self._sent[:count]]

    def _forget_hbm(self) -> None:
        """Drop what is cached in HBM once the engine is idle; the shadow keeps its copies."""
        for _ in range(TRIES):
            self._idle_snapshot()
            if self.client.forget_hbm():
                return
            time.sleep(POLL_S)
        raise EngineBusyError(f"{self.client.url} is never idle; stop the traffic, or measure an engine of its own")

    def _ask(self, prompts: Sequence[Sequence[int]]) -> list[FirstToken]:
        """Return the answers to requests that are sent one after another without waiting."""
        return self.client.first_tokens(self._model, prompts)

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(self._token_ids, k=tokens)

    def _few_new(self) -> list[int]:
        return self._prompt(max(1, self.key.block_size // 2))

    def _reused(self, answer: FirstToken, tokens: int) -> bool:
        if answer.cached_tokens is None:
            raise MeasurementError(
                f"{self.client.url} does not say how much of a prompt it reused; start the engine with "
                "--enable-prompt-tokens-details"
            )
        return answer.cached_tokens == tokens

    def _idle_snapshot(self) -> EngineSnapshot:
        deadline_s = time.monotonic() + IDLE_WAIT_S
        while True:
            snapshot = self.client.snapshot()
            if snapshot.running == 0 and snapshot.waiting == 0:
                return snapshot
            if time.monotonic() > deadline_s:
                raise EngineBusyError(
                    f"{self.client.url} has {snapshot.running} running and {snapshot.waiting} waiting requests since "
                    f"{IDLE_WAIT_S:.0f} s; stop the traffic, or measure an engine of its own"
                )
            time.sleep(POLL_S)

    def _settled_snapshot(self, before: EngineSnapshot) -> EngineSnapshot | None:
        """Return the idle snapshot that includes the sample's own steps; None when the engine stays busy."""
        deadline_s = time.monotonic() + SETTLE_WAIT_S
        while time.monotonic() < deadline_s:
            snapshot = self.client.snapshot()
            own_steps_seen = snapshot.steps.prefill > before.steps.prefill
            if own_steps_seen and snapshot.running == 0 and snapshot.waiting == 0:
                return snapshot
            time.sleep(POLL_S)
        return None

    def _disturbed(self, before: EngineSnapshot, after: EngineSnapshot, spot: Spot) -> bool:
        """Say whether the engine did more than this sample's own requests."""
        own_steps = math.ceil(spot.tokens / self.key.max_batched_tokens) + 1
        if spot.part is Part.RESTORE:
            own_steps = 2 * (spot.outstanding + 1) + 2
        return (
            after.instance_id != before.instance_id
            or after.steps.mixed > before.steps.mixed
            or after.steps.pure_decode > before.steps.pure_decode
            or after.steps.prefill - before.steps.prefill > own_steps
        )


_MISSING = {
    Part.PREFILL: "the engine had seen each new prompt before, which cannot be",
    Part.GRID: "the context does not stay in HBM; give the engine more KV (spec.engine.kvCacheSize)",
    Part.RESTORE: (
        "the shadow did not give back what had been published; give it more room (spec.kvShadow.size), and see the "
        "engine's log for failed pages"
    ),
}
