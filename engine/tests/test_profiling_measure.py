"""Faults of an engine during measurement, played by a scripted one on a real socket (real vLLM: cli/tests)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import KEY, ScriptedEngine, served

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.profile import Profile
from coda_engine.contract.reasons import Reason
from coda_engine.profiling import (
    EngineBusyError,
    EngineClient,
    EngineRequestError,
    MeasurementError,
    measure_profile,
)
from coda_engine.profiling import sampler as sampler_module
from coda_engine.profiling.plan import QUICK, Part, Spot
from coda_engine.profiling.sampler import Sampler


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "POLL_S", 0.002)


def measured(engine: ScriptedEngine, token: str | None = None, samples_file: Path | None = None) -> Profile:
    with served(engine) as url:
        client = engine.client(url, token)
        return measure_profile(client, effort=QUICK, progress=lambda line: None, samples_file=samples_file)


def without_shadow(**faults: Any) -> ScriptedEngine:
    return ScriptedEngine(shadow_bytes=0, **faults)


def test_a_profile_carries_the_engines_key_and_has_every_part_checked() -> None:
    profile = measured(ScriptedEngine())
    profile.require_match(KEY)
    assert set(profile.parts) == {"prefill", "prefill_grid", "restore"}
    assert profile.prefill.points[-1].ms > profile.prefill.points[0].ms
    assert profile.provenance.quick


def test_restores_are_measured_as_bytes_over_all_ranks() -> None:
    restore = measured(ScriptedEngine()).restore
    assert restore is not None
    assert all(point.x % KEY.kv_block_bytes == 0 for curve in restore.curves for point in curve.points)
    assert [curve.outstanding for curve in restore.curves] == [0, 1, 2]


def test_an_engine_without_a_shadow_gets_no_restore_curve() -> None:
    profile = measured(without_shadow())
    assert profile.restore is None
    assert profile.prefill_grid is not None


def test_what_is_measured_as_new_was_never_sent_and_what_is_context_is_reused() -> None:
    engine = without_shadow()
    profile = measured(engine)
    assert profile.prefill_grid is not None
    reused = {len(prompt) - new for prompt, new in zip(engine.prompts, engine.new_tokens, strict=True)}
    contexts = [*profile.prefill_grid.rows, *profile.prefill_grid.held_out]
    assert reused == {0, *(item.context_tokens for item in contexts)}


def test_noise_of_the_curve_that_only_the_grid_shows_is_measured_away() -> None:
    engine = without_shadow(ms_per_token=2.0, slow_small_prompts=3)
    with served(engine) as url:
        profile = measure_profile(
            engine.client(url), effort=replace(QUICK, optional_until_s=None), progress=lambda line: None
        )
    smallest = profile.prefill.points[0]
    assert smallest.repetitions > QUICK.rounds
    assert smallest.ms == pytest.approx(smallest.x * engine.ms_per_token)


def test_a_quick_profile_leaves_out_restores_that_make_no_sense_and_says_so() -> None:
    engine, said = ScriptedEngine(senseless_restores=True), []
    with served(engine) as url:
        profile = measure_profile(engine.client(url), effort=QUICK, progress=said.append)
    assert set(profile.parts) == {"prefill", "prefill_grid"}
    assert any(line.startswith("left out of the profile: restore") for line in said)


def test_a_quick_profile_is_not_late_for_parts_that_may_be_missing() -> None:
    rounds = []
    for ms_per_token in (1.0, 0.05):
        said: list[str] = []
        engine = ScriptedEngine(senseless_restores=True, ms_per_token=ms_per_token)
        with served(engine) as url:
            profile = measure_profile(engine.client(url), effort=QUICK, progress=said.append)
        assert profile.restore is None
        rounds.append(sum(line.startswith("once more") for line in said))
    slow, fast = rounds
    assert slow == 0 < fast


def test_an_interrupted_measurement_goes_on_where_it_stopped(tmp_path: Path) -> None:
    samples, engine = tmp_path / ".profile.json.samples", without_shadow(dies_after=20)
    with pytest.raises(EngineRequestError, match="answered 500"):
        measured(engine, samples_file=samples)
    kept = json.loads(samples.read_text())["rows"]
    taken = sum(len(row["samples_ms"]) for row in kept)
    assert taken >= 10
    engine.dies_after = 10**9
    said: list[str] = []
    with served(engine) as url:
        profile = measure_profile(engine.client(url), effort=QUICK, progress=said.append, samples_file=samples)
    assert f"going on with {taken} samples of {samples}" in said
    assert {point.x for point in profile.prefill.points} <= {row["spot"]["tokens"] for row in kept}
    assert not samples.exists()


@pytest.mark.parametrize("content", ["", "{}", '{"shape": 1, "key": "another"}'])
def test_samples_that_are_of_no_use_are_measured_again(tmp_path: Path, content: str) -> None:
    samples = tmp_path / "samples"
    samples.write_text(content)
    measured(without_shadow(), samples_file=samples).require_match(KEY.model_copy(update={"shadow_layout": ""}))


def test_a_shadow_that_gives_nothing_back_is_named_with_its_field(tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    with pytest.raises(MeasurementError, match=r"restore: restoring \d+ tokens: the shadow .*spec\.kvShadow\.size"):
        measured(ScriptedEngine(shadow_loses=True), samples_file=samples)
    assert not samples.exists(), "samples that are no profile must not spoil the next measurement"


def test_an_engine_that_does_not_say_what_it_reused_is_told_its_option() -> None:
    with pytest.raises(MeasurementError, match="--enable-prompt-tokens-details"):
        measured(without_shadow(says_cached=False))


def test_a_disturbed_sample_is_measured_again() -> None:
    engine = without_shadow(disturb_samples={1, 2, 5})
    with served(engine) as url:
        sampler = Sampler(engine.client(url))
        sampler.sample_ms(Spot(Part.PREFILL, 64))
        assert len(engine.prompts) == 3
        sampler.sample_ms(Spot(Part.PREFILL, 64))
        assert len(engine.prompts) == 4
        sampler.sample_ms(Spot(Part.GRID, 32, 64))
        assert len(engine.prompts) == 6


def test_an_engine_that_is_disturbed_all_the_time_is_not_profiled() -> None:
    with pytest.raises(EngineBusyError, match="during each of 4 measurements"):
        measured(ScriptedEngine(disturb_samples=set(range(1_000))))


def test_a_busy_engine_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "IDLE_WAIT_S", 0.1)
    with pytest.raises(EngineBusyError, match="has 3 running and 0 waiting"):
        measured(ScriptedEngine(busy_requests=3))


def test_a_small_vocabulary_gets_prompts_of_its_own_tokens() -> None:
    engine = without_shadow(vocabulary=256)
    measured(engine)
    assert max(max(prompt) for prompt in engine.prompts) < 256


def test_a_wrong_internal_token_is_named() -> None:
    with pytest.raises(EngineRequestError, match="internal-token-file"):
        measured(ScriptedEngine(token="right"), token="wrong")
    assert measured(without_shadow(token="right"), token="right").full_key.model_digest == KEY.model_digest


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineRequestError, match="cannot be reached"):
        measure_profile(EngineClient("http://127.0.0.1:9"), effort=QUICK, progress=lambda line: None)


def test_a_refused_delivery_carries_the_engines_reason() -> None:
    engine = without_shadow()
    with served(engine) as url:
        client = engine.client(url)
        profile = measure_profile(client, effort=QUICK, progress=lambda line: None)
        assert client.put_profile(profile).digest == "p"
        engine.put_status = 409
        with pytest.raises(ProfileRefusedError) as refused:
            client.put_profile(profile)
    assert refused.value.reason is Reason.PROFILE_MISMATCH
    assert refused.value.detail == "cpu"
