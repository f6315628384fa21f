"""Another driver under a measured engine: its held-out points are looked at again (a scripted engine)."""

import pytest
from scripted_engine import ScriptedEngine, served

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.profile import Profile
from coda_engine.profiling import QUICK, EngineClient, MeasurementError, measure_profile, needs_revalidation, revalidate
from coda_engine.profiling import sampler as sampler_module


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "POLL_S", 0.002)


@pytest.fixture(scope="module")
def measured() -> Profile:
    engine = ScriptedEngine()
    with served(engine) as url:
        return measure_profile(engine.client(url), effort=QUICK, progress=lambda line: None)


def checked(profile: Profile, engine: ScriptedEngine) -> Profile:
    with served(engine) as url:
        return revalidate(profile, engine.client(url), progress=lambda line: None)


def test_another_driver_asks_for_another_look_and_another_model_does_not(measured: Profile) -> None:
    with served(ScriptedEngine(driver="kernel 7")) as url:
        assert needs_revalidation(measured, EngineClient(url))
    with served(ScriptedEngine()) as url:
        assert not needs_revalidation(measured, EngineClient(url))
    with served(ScriptedEngine(driver="kernel 7", shadow_bytes=0)) as url:
        assert not needs_revalidation(measured, EngineClient(url)), "without a shadow it is another engine"


def test_held_out_points_that_hold_again_add_the_driver_and_change_nothing_else(measured: Profile) -> None:
    engine = ScriptedEngine(driver="kernel 7")
    again = checked(measured, engine)
    assert [entry.driver for entry in again.revalidations] == ["kernel 7"]
    assert again.soft_mismatches(engine.key) == []
    assert again.model_copy(update={"revalidations": []}) == measured


def test_only_held_out_points_are_measured_again(measured: Profile) -> None:
    engine = ScriptedEngine(driver="kernel 7")
    checked(measured, engine)
    built = {point.x for point in measured.prefill.points}
    new = [tokens for tokens in engine.new_tokens if tokens > 256]
    assert new
    assert not built & set(new)


def test_costs_that_changed_with_the_driver_are_refused_with_the_remedy(measured: Profile) -> None:
    with pytest.raises(MeasurementError, match=r"prefill: .* measure a new profile \(coda profile --fresh\)"):
        checked(measured, ScriptedEngine(driver="kernel 7", ms_per_token=0.2))


def test_a_profile_of_another_engine_is_not_looked_at_again(measured: Profile) -> None:
    with pytest.raises(ProfileRefusedError, match="shadow_layout"):
        checked(measured, ScriptedEngine(driver="kernel 7", shadow_bytes=0))
