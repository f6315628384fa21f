import pytest
from pydantic import ValidationError

from coda_engine.contract.errors import DocumentError, ProfileRefusedError
from coda_engine.contract.profile import (
    CurvePoint,
    FullKey,
    HeldOutPoint,
    PrefillProfile,
    Profile,
    Provenance,
    SpecKey,
)
from coda_engine.contract.reasons import Reason

KEY = FullKey(
    spec=SpecKey(model="m", device="cpu", engine="0.32.0"),
    model_digest="d",
    hardware="a CPU x 1",
    vllm_version="0.32.0",
    adapter_digest="a",
    block_size=32,
    attention_backend="CPU_ATTN",
    graph_mode="NONE",
    max_batched_tokens=512,
    max_context_tokens=8192,
    driver="kernel 6",
)


def profile(points=((128, 100.0), (1024, 900.0)), held_out=((512, 450.0, 460.0),), key=KEY):
    return Profile(
        full_key=key,
        prefill=PrefillProfile(
            points=[CurvePoint(x=x, ms=ms) for x, ms in points],
            held_out=[
                HeldOutPoint(x=x, measured_ms=measured, predicted_ms=predicted) for x, measured, predicted in held_out
            ],
            error_bound=0.25,
        ),
        provenance=Provenance(measured_at="2026-01-01T00:00:00Z", duration_s=10, coda_version="0.1.0", quick=True),
    )


def test_a_profile_of_this_engine_is_taken():
    profile().require_match(KEY)


@pytest.mark.parametrize(
    "field", ["model_digest", "hardware", "vllm_version", "adapter_digest", "attention_backend", "graph_mode"]
)
def test_a_profile_of_another_configuration_is_refused_naming_the_field(field):
    with pytest.raises(ProfileRefusedError, match=field) as refused:
        profile().require_match(KEY.model_copy(update={field: "other"}))
    assert refused.value.reason is Reason.PROFILE_MISMATCH


def test_a_profile_of_another_model_is_refused_naming_the_spec_field():
    other = KEY.model_copy(update={"spec": KEY.spec.model_copy(update={"model": "n"})})
    with pytest.raises(ProfileRefusedError, match=r"spec\.model: 'n' != 'm'"):
        profile().require_match(other)


def test_another_driver_alone_does_not_refuse_a_profile():
    profile().require_match(KEY.model_copy(update={"driver": "kernel 7"}))


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
    newer = original = profile().to_json()
    newer = original.replace(b'{"schema_version":1,', b'{"schema_version":1,"restore":{"points":[]},')
    assert newer != original
    assert Profile.from_json(newer).digest() == profile().digest()


def test_an_unreadable_profile_names_its_field():
    with pytest.raises(DocumentError, match=r"Profile\.prefill: field required"):
        Profile.from_json(b'{"schema_version":1,"full_key":' + KEY.to_json() + b"}")


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
