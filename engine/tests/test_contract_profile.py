import pytest
from pydantic import ValidationError

from coda_engine.contract.errors import DocumentError, ProfileRefusedError
from coda_engine.contract.measured import CostCurve, CurvePoint, HeldOutPoint, RestoreCurve, RestoreProfile
from coda_engine.contract.profile import MAX_PROFILE_BYTES, Profile, Revalidation, SpecKey
from coda_engine.contract.reasons import Reason
from coda_engine.profiling.assumed import assumed_key, assumed_profile

KEY = assumed_key(SpecKey(model="m", device="cpu", engine="0.32.0"))


def profile(points=((128, 100.0), (1024, 900.0)), held_out=((512, 450.0, 460.0),), key=KEY):
    prefill = CostCurve(
        points=[CurvePoint(x=x, ms=ms) for x, ms in points],
        held_out=[
            HeldOutPoint(x=x, measured_ms=measured, predicted_ms=predicted) for x, measured, predicted in held_out
        ],
        error_bound=0.25,
    )
    return assumed_profile(key).model_copy(update={"prefill": prefill})


def test_a_profile_of_this_engine_is_taken():
    profile().require_match(KEY)


@pytest.mark.parametrize(
    "field",
    [
        "model_digest",
        "hardware",
        "vllm_version",
        "adapter_digest",
        "attention_backend",
        "graph_mode",
        "shadow_layout",
        "transfer_topology",
    ],
)
def test_a_profile_of_another_configuration_is_refused_naming_the_field(field):
    with pytest.raises(ProfileRefusedError, match=field) as refused:
        profile().require_match(KEY.model_copy(update={field: "other"}))
    assert refused.value.reason is Reason.PROFILE_MISMATCH


def test_a_profile_of_another_model_is_refused_naming_the_spec_field():
    other = KEY.model_copy(update={"spec": KEY.spec.model_copy(update={"model": "n"})})
    with pytest.raises(ProfileRefusedError, match=r"spec\.model: 'n' != 'm'"):
        profile().require_match(other)


def test_a_profile_of_another_kv_size_is_refused():
    with pytest.raises(ProfileRefusedError, match="kv_block_bytes: 1 != 737280"):
        profile().require_match(KEY.model_copy(update={"kv_block_bytes": 1}))


def test_another_driver_alone_does_not_refuse_a_profile_but_is_named():
    engine = KEY.model_copy(update={"driver": "kernel 7", "runtime": "torch 3"})
    profile().require_match(engine)
    assert profile().soft_mismatches(engine) == ["driver: 'kernel 7' != 'kernel 6'", "runtime: 'torch 3' != 'torch 2'"]
    assert profile().soft_mismatches(KEY) == []


def test_a_revalidated_profile_serves_the_old_and_the_new_driver():
    engine = KEY.model_copy(update={"driver": "kernel 7"})
    checked = Revalidation(driver="kernel 7", runtime=KEY.runtime, checked_at="2026-01-01T00:00:00Z", worst_error=0.1)
    revalidated = profile().model_copy(update={"revalidations": [checked]})
    assert revalidated.soft_mismatches(engine) == []
    assert revalidated.soft_mismatches(KEY) == []
    assert revalidated.digest() != profile().digest()


def test_a_profile_that_failed_its_own_check_is_refused():
    with pytest.raises(ProfileRefusedError, match="off by 50%") as refused:
        profile(held_out=((512, 400.0, 600.0),)).require_match(KEY)
    assert refused.value.reason is Reason.PROFILE_NOT_VALIDATED


@pytest.mark.parametrize(
    "points",
    [
        ((128, 100.0),),
        ((1024, 900.0), (128, 100.0)),
        ((128, 100.0), (1024, float("nan"))),
        ((128, 100.0), (1024, 90.0)),
        ((128, 100.0), (10**400, 900.0)),
    ],
    ids=["one point", "not sorted", "NaN", "cost falls", "no number of tokens"],
)
def test_a_curve_that_cannot_be_true_is_not_a_profile(points):
    with pytest.raises(ValidationError):
        profile(points=points)


@pytest.mark.parametrize(
    ("measured_ms", "predicted_ms"),
    [("0.0", "1.0"), ("-5.0", "1.0"), ("NaN", "1.0"), ("5.0", "NaN"), ("5.0", "-Infinity")],
)
def test_a_check_that_says_nothing_is_not_a_profile(measured_ms, predicted_ms):
    document = profile(held_out=((512, 77.0, 88.0),)).to_json()
    document = document.replace(b"77.0", measured_ms.encode()).replace(b"88.0", predicted_ms.encode())
    with pytest.raises(DocumentError, match="held_out"):
        Profile.from_json(document)


def test_a_profile_survives_the_wire_with_its_digest():
    original = profile()
    assert Profile.from_json(original.to_json()).digest() == original.digest()


def test_a_newer_writers_extra_fields_are_ignored():
    original = profile().to_json()
    newer = original.replace(b'{"schema_version":2,', b'{"schema_version":2,"attention":{"points":[]},')
    assert newer != original
    assert Profile.from_json(newer).digest() == profile().digest()


@pytest.mark.parametrize(("schema", "words"), [(b"1", "measure again"), (b"3", "update Coda")])
def test_a_profile_of_another_schema_is_refused_with_the_remedy_alone(schema, words):
    document = profile().to_json().replace(b'{"schema_version":2,', b'{"schema_version":%b,' % schema)
    with pytest.raises(DocumentError, match=words) as refused:
        Profile.from_json(document)
    assert "\n" not in str(refused.value)


def test_a_miss_within_the_measurements_own_noise_is_none():
    held_out = [HeldOutPoint(x=500, measured_ms=1.0, predicted_ms=2.0)]
    curves = [RestoreCurve(outstanding=0, points=[CurvePoint(x=100, ms=1.0), CurvePoint(x=1_000, ms=9.0)])]
    noisy = RestoreProfile(curves=curves, held_out=held_out, error_bound=0.1, resolution_ms=1.5)
    profile().model_copy(update={"restore": noisy}).require_match(KEY)
    sharp = noisy.model_copy(update={"resolution_ms": 0.5})
    with pytest.raises(
        ProfileRefusedError, match=r"restore: 2\.0 ms are predicted for 500 bytes, 1\.0 ms were"
    ) as refused:
        profile().model_copy(update={"restore": sharp}).require_match(KEY)
    assert refused.value.reason is Reason.PROFILE_NOT_VALIDATED


def test_a_profile_says_up_to_where_it_was_measured():
    whole = assumed_profile(KEY, ms_per_context_token=0.01, restore_ms_per_mb=1.0)
    assert whole.domain.model_dump() == {
        "new_tokens": 4_096, "context_tokens": 8_192, "restore_bytes": 100_000_000, "outstanding_bytes": 0,
    }  # fmt: skip
    assert profile().domain.context_tokens == 0
    assert Profile.from_json(whole.to_json()) == whole


def test_the_largest_profile_that_a_full_measurement_makes_is_far_below_the_limit():
    spots = [
        CurvePoint(x=10**12 + number, ms=1_234.567 + number, spread_ms=1_234.567, repetitions=10)
        for number in range(64)
    ]
    curve = profile().prefill.model_copy(update={"points": spots})
    whole = assumed_profile(KEY, ms_per_context_token=0.01, restore_ms_per_mb=1.0)
    assert len(whole.model_copy(update={"prefill": curve}).to_json()) < MAX_PROFILE_BYTES / 4


def test_an_unreadable_profile_names_its_field():
    with pytest.raises(DocumentError, match=r"Profile\.prefill: field required"):
        Profile.from_json(b'{"schema_version":2,"full_key":' + KEY.to_json() + b"}")


def test_specifications_that_differ_have_different_keys():
    assert SpecKey(model="m").digest() != SpecKey(model="m", quantization="fp8").digest()
    assert SpecKey(model="m").digest() == SpecKey(model="m").digest()


def test_a_message_about_a_document_does_not_repeat_it():
    with pytest.raises(DocumentError) as no_json:
        Profile.from_json(b"no JSON " * 1000)
    assert len(str(no_json.value)) < 200
    with pytest.raises(DocumentError, match=r"full_key: .*\(given: 'xxx.*\.\.\.\)") as long_value:
        Profile.from_json(b'{"full_key":"%b"}' % (b"x" * 60_000))
    assert len(str(long_value.value)) < 500
