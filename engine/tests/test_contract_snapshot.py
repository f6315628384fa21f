"""The snapshot as other versions read and write it."""

import json

import pytest

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.reasons import Feature, PreparationPath, Reason
from coda_engine.contract.snapshot import Capability, EngineSnapshot, Reservation


def a_snapshot(**fields) -> EngineSnapshot:
    return EngineSnapshot(
        instance_id="i",
        version=3,
        published_at_s=10.0,
        started_at_s=1.0,
        capabilities={Feature.IDENTITY: Capability(enabled=True, reason=Reason.ENABLED)},
        **fields,
    )


def as_sent(snapshot: EngineSnapshot, **changes) -> str:
    return json.dumps(json.loads(snapshot.to_json()) | changes)


def test_a_snapshot_survives_the_wire():
    snapshot = a_snapshot(reservation=Reservation(tier=1, wait_ms=2.5, kv_blocks=7), waiting_by_tier={0: 2, 3: 1})
    assert EngineSnapshot.from_json(snapshot.to_json()) == snapshot


def test_fields_of_newer_engines_are_ignored():
    sent = as_sent(a_snapshot(), temperature=3, steps={"teleported": 4, "mixed": 2})
    assert EngineSnapshot.from_json(sent).steps.mixed == 2


def test_features_that_only_newer_engines_have_are_left_out():
    newer = {"Teleport": {"enabled": True, "reason": "Enabled"}, "Identity": {"enabled": True, "reason": "Enabled"}}
    assert set(EngineSnapshot.from_json(as_sent(a_snapshot(), capabilities=newer)).capabilities) == {Feature.IDENTITY}


def test_a_reason_of_a_newer_engine_keeps_its_feature_s_state_and_detail():
    newer = {"Identity": {"enabled": False, "reason": "MoonIsFull", "detail": "since Tuesday"}}
    state = EngineSnapshot.from_json(as_sent(a_snapshot(), capabilities=newer)).capabilities[Feature.IDENTITY]
    assert (state.enabled, state.reason, state.detail) == (False, Reason.UNKNOWN, "since Tuesday")


def test_documents_of_older_engines_have_the_new_fields_empty():
    old = json.loads(a_snapshot().to_json())
    for name in ("reservation", "shadow_bytes_used", "steps"):
        del old[name]
    snapshot = EngineSnapshot.from_json(json.dumps(old))
    assert (snapshot.reservation, snapshot.shadow_bytes_used, snapshot.steps.shadow_pages) == (None, 0, {})


@pytest.mark.parametrize("capabilities", [[], {"Identity": "on"}, {"Identity": {"reason": "Enabled"}}])
def test_capabilities_of_another_shape_are_refused(capabilities):
    with pytest.raises(DocumentError, match="capabilities"):
        EngineSnapshot.from_json(as_sent(a_snapshot(), capabilities=capabilities))


@pytest.mark.parametrize(
    ("tokens", "path"),
    [
        ((100, 20, 30), PreparationPath.HBM),
        ((10, 200, 30), PreparationPath.SHADOW),
        ((10, 20, 30), PreparationPath.RECOMPUTE),
        ((40, 40, 0), PreparationPath.SHADOW),
        ((40, 0, 40), PreparationPath.RECOMPUTE),
        ((0, 0, 0), PreparationPath.RECOMPUTE),
    ],
)
def test_a_path_is_where_most_tokens_come_from_and_of_equal_shares_the_dearer(tokens, path):
    assert PreparationPath.of(*tokens) is path
