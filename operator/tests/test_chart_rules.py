"""What the chart lets the operator do: each child as it is handled, and no more where it would hurt."""

from pathlib import Path
from typing import Any

import yaml

from coda_operator.desired.cluster import possible_children

NAMES = Path(__file__).resolve().parents[2] / "charts" / "coda" / "templates" / "_names.tpl"


def rules() -> list[dict[str, Any]]:
    _, _, defined = NAMES.read_text().partition('{{- define "coda.rules" -}}')
    loaded: list[dict[str, Any]] = yaml.safe_load(defined.partition("{{- end -}}")[0])
    return loaded


def verbs(group: str, plural: str) -> set[str]:
    return {
        verb for rule in rules() if group in rule["apiGroups"] and plural in rule["resources"] for verb in rule["verbs"]
    }


def test_every_child_can_be_read_made_and_deleted() -> None:
    for ref in possible_children("demo"):
        assert {"get", "create", "delete"} <= verbs(ref.resource.group, ref.resource.plural), ref


def test_a_secret_is_made_once_and_nobody_s_secret_can_be_changed_or_listed() -> None:
    assert verbs("", "secrets") == {"get", "create", "delete"}


def test_no_rule_takes_everything() -> None:
    for rule in rules():
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
