import pytest

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.owned_args import OWNED_ARGUMENTS, owned_argument_problems
from coda_engine.contract.settings import Settings
from coda_engine.contract.snapshot import EngineSnapshot, session_key


def test_an_empty_document_is_codas_own_order_with_its_own_constants():
    settings = Settings.parse(b"{}")
    assert settings.admission.state.policy == "coda"
    assert (settings.admission.state.tau_ms, settings.admission.state.max_wait_ms) == (None, None)
    assert settings.admission.state.frontier == 64
    assert settings.admission.execution.min_gain == 0.05


def test_documents_that_mean_the_same_have_one_digest():
    assert Settings.parse(b'{"admission":{"state":{"frontier":64}}}').digest() == Settings.parse(b"{}").digest()
    assert Settings.parse(b'{"admission":{"state":{"tauMs":5001}}}').digest() != Settings.parse(b"{}").digest()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b'{"admission":{"state":{"tauMs":-1}}}', r"settings\.admission\.state\.tauMs: .*greater than or equal to 1"),
        (
            b'{"admission":{"state":{"policy":"lifo"}}}',
            r"settings\.admission\.state\.policy: .*'coda', 'tiered-aging', .*'fifo'",
        ),
        (b'{"admission":{"state":{"tau":1}}}', r"settings\.admission\.state\.tau: unknown field"),
        (
            b'{"admission":{"execution":{"minCohort":3}}}',
            r"settings\.admission\.execution: minCohort 3 .*minRequests >= 6",
        ),
        (b'{"admission":{"execution":{"minShare":0.6}}}', r"minShare: .*less than or equal to 0\.5"),
        (b'{"placement":{"policy":"random"}}', r"settings\.placement\.policy: "),
        (b"not json", r"settings: invalid JSON"),
    ],
)
def test_an_impossible_setting_is_refused_naming_field_and_limit(document, message):
    with pytest.raises(DocumentError, match=message):
        Settings.parse(document)


@pytest.mark.parametrize("argument", sorted(OWNED_ARGUMENTS))
def test_every_owned_argument_is_refused_by_name(argument):
    assert owned_argument_problems(["--seed", "1", f"{argument}=x"])[0].startswith(f"{argument} belongs to Coda")


@pytest.mark.parametrize(
    "spelling",
    [
        "--scheduler_cls=x",
        "-tp",
        "--kv_transfer_config.kv_role",
        "--scheduler-c",
        "--data-par=2",
        "-dpn=1",
        "-dph",
        "-sc",
        "-asc=2",
    ],
)
def test_other_spellings_of_owned_arguments_are_refused(spelling):
    assert len(owned_argument_problems([spelling])) == 1


def test_other_arguments_are_left_alone():
    assert (
        owned_argument_problems(["--seed", "1", "--max-log-len=5", "--chat-template", "--model-is-a-value.jinja2"[2:]])
        == []
    )


def test_a_session_key_tells_tenants_apart_and_hides_both():
    assert session_key("a", "bc") != session_key("ab", "c")
    assert "secret" not in session_key("tenant", "secret")


def test_a_snapshot_counts_waiting_and_running_over_all_tiers():
    snapshot = EngineSnapshot(
        instance_id="i",
        version=1,
        published_at_s=0,
        started_at_s=0,
        waiting_by_tier={0: 1, 3: 2},
        running_by_tier={1: 4},
    )
    back = EngineSnapshot.from_json(snapshot.to_json())
    assert (back.waiting, back.running) == (3, 4)
    assert back == snapshot
