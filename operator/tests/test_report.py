from dataclasses import replace
from datetime import UTC, datetime

from operator_builders import cluster_of, decided, observed, stored

from coda_operator.apply import Action, Applied, Change, is_applied, with_digest
from coda_operator.report import event, new_status, notes
from coda_operator.status import CodaClusterStatus, Condition, ConditionType, Verdict, merge_conditions

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOTHING = Applied([])


def condition(status: str = "True", reason: str = "AllReady", message: str = "", since: str = "before") -> Condition:
    return Condition.model_validate(
        {"type": "Ready", "status": status, "reason": reason, "message": message, "lastTransitionTime": since}
    )


def test_the_transition_time_moves_only_when_the_status_flips():
    still = Verdict(ConditionType.READY, True, "AllReady", "another message")
    assert merge_conditions([condition()], [still], 2, "now")[0].last_transition_time == "before"
    flipped = Verdict(ConditionType.READY, False, "EnginesStarting", "")
    assert merge_conditions([condition()], [flipped], 2, "now")[0].last_transition_time == "now"


def test_every_condition_says_which_generation_it_is_about():
    verdicts = decided(observed()).verdicts
    assert {item.observed_generation for item in merge_conditions([], verdicts, 7, "now")} == {7}


def test_conditions_without_a_new_verdict_stay_as_they_were():
    before = [Condition(type="Profiled", status="True", reason="ProfileFound", observed_generation=1)]
    after = merge_conditions(before, [Verdict(ConditionType.READY, False, "InvalidSpec", "")], 2, "now")
    assert [(item.type, item.observed_generation) for item in after] == [("Profiled", 1), ("Ready", 2)]


def test_conditions_come_in_the_order_in_which_they_become_true():
    conditions = merge_conditions([], reversed(decided(observed()).verdicts), 1, "now")
    assert [item.type for item in conditions] == [kind.value for kind in ConditionType]


def test_what_the_api_server_refused_is_why_it_is_not_ready():
    before = observed(profile=stored(cluster_of()))
    status = new_status(before, decided(before), Applied([], "spec.template.spec.containers[0].foo: unknown"), NOW)
    ready = status.condition(ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "RefusedByAPIServer")
    assert "containers[0].foo" in ready.message


def test_a_new_message_alone_is_no_event():
    before, after = [condition(message="1 of 2")], [condition(message="2 of 2")]
    assert notes(before, after, NOTHING) == []


def test_a_flip_is_an_event_and_a_failure_a_warning():
    good = notes([condition("False", "EnginesStarting")], [condition("True", "AllReady", "serving")], NOTHING)
    assert [(note.reason, note.is_warning) for note in good] == [("AllReady", False)]
    bad = notes([condition()], [condition("False", "InvalidSpec", "spec.engine.replicas: ...")], NOTHING)
    assert [(note.reason, note.is_warning) for note in bad] == [("InvalidSpec", True)]


def test_ready_does_not_repeat_the_condition_that_it_is_false_for():
    verdicts = decided(observed()).verdicts
    after = merge_conditions([], verdicts, 1, "now")
    reasons = [note.message.split()[0] for note in notes([], after, NOTHING)]
    assert "Profiled" in reasons
    assert "Ready" not in reasons


def test_children_made_at_once_are_one_event():
    applied = Applied([Change(Action.CREATED, "Secret a"), Change(Action.CREATED, "Job b")])
    assert [note.message for note in notes([], [], applied)] == ["created Secret a, Job b"]


def test_an_event_points_at_the_object_and_fits():
    note = replace(notes([], [condition("False", "InvalidSpec", "x" * 5000)], NOTHING)[0])
    item = event(observed(), note, NOW)
    assert item["involvedObject"]["uid"] == observed().uid
    assert len(item["message"]) <= 1024
    assert item["type"] == "Warning"


def test_an_unreadable_status_counts_as_none():
    assert CodaClusterStatus.read({"conditions": "nonsense"}) == CodaClusterStatus()


def test_nothing_is_written_when_every_wanted_field_is_there():
    wanted = with_digest({"metadata": {"name": "a"}, "spec": {"ports": [{"port": 1}], "on": False, "list": []}})
    live = {
        "metadata": {**wanted["metadata"], "uid": "u"},
        "spec": {"ports": [{"port": 1, "protocol": "TCP"}], "more": 1},
    }
    assert is_applied(wanted, live)


def test_a_field_that_somebody_changed_is_written_again():
    wanted = with_digest({"metadata": {"name": "a"}, "spec": {"replicas": 2}})
    assert not is_applied(wanted, {**wanted, "spec": {"replicas": 3}})


def test_a_field_that_is_no_longer_wanted_shows_in_the_digest():
    before = with_digest({"metadata": {"name": "a"}, "spec": {"replicas": 2, "paused": True}})
    assert not is_applied(with_digest({"metadata": {"name": "a"}, "spec": {"replicas": 2}}), before)


def test_an_item_that_somebody_added_to_a_list_is_seen():
    wanted = {"ports": [{"port": 1}]}
    assert not is_applied(wanted, {"ports": [{"port": 1}, {"port": 2}]})
