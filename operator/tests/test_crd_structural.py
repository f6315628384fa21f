from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from coda_operator.crd.structural import add_rules, structural_schema
from coda_operator.errors import SchemaError
from coda_operator.spec import Quantity


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    """Something inside.

    Attributes: not for kubectl explain.
    """

    model_config = ConfigDict(extra="forbid")

    size: int = Field(default=3, ge=1, le=9)
    share: float = Field(default=0.5, gt=0, lt=1)


class Outer(BaseModel):
    color: Color = Field(default=Color.RED, description="A color.")
    kind: Literal["only"] | None = None
    inner: Inner = Inner()
    maybe: Inner | None = Field(default=None, description="Perhaps.")
    many: list[Inner] = Field(default_factory=list, max_length=4)
    by_name: dict[str, int] = Field(default_factory=dict)
    anything: dict[str, Any] = Field(default_factory=dict)
    memory: Quantity | None = Field(default=None, description="Bytes.")
    needed: str


def field(name: str) -> dict[str, Any]:
    properties: dict[str, dict[str, Any]] = structural_schema(Outer)["properties"]
    return properties[name]


def test_references_are_written_out_and_the_fields_own_description_wins():
    assert field("color") == {"type": "string", "enum": ["red", "blue"], "default": "red", "description": "A color."}


def test_an_optional_field_is_the_field_without_null():
    assert field("maybe")["type"] == "object"
    assert field("maybe")["description"] == "Perhaps."
    assert "default" not in field("maybe")


def test_a_literal_becomes_an_enum():
    assert field("kind") == {"type": "string", "enum": ["only"]}


def test_exclusive_bounds_become_kubernetes_booleans():
    share = field("inner")["properties"]["share"]
    assert share["minimum"] == 0
    assert share["exclusiveMinimum"] is True
    assert share["maximum"] == 1
    assert share["exclusiveMaximum"] is True


def test_inclusive_bounds_stay():
    assert field("inner")["properties"]["size"] == {"type": "integer", "default": 3, "minimum": 1, "maximum": 9}


def test_additional_properties_false_is_left_to_the_api_server():
    assert "additionalProperties" not in field("inner")


def test_a_mapping_of_one_type_keeps_its_values_schema():
    assert field("by_name")["additionalProperties"] == {"type": "integer"}


def test_a_free_mapping_keeps_its_unknown_fields():
    assert field("anything") == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def test_a_quantity_is_an_integer_or_a_string_with_its_pattern():
    memory = field("memory")
    assert memory["x-kubernetes-int-or-string"] is True
    assert memory["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert "Gi" in memory["pattern"]
    assert "type" not in memory


def test_the_default_of_a_group_is_whole_because_rules_are_checked_on_it():
    assert field("inner")["default"] == {"size": 3, "share": 0.5}


def test_a_default_leaves_out_optional_fields_that_are_not_set():
    class Group(BaseModel):
        size: int = 1
        name: str | None = None

    class Root(BaseModel):
        group: Group = Group()

    assert structural_schema(Root)["properties"]["group"]["default"] == {"size": 1}


def test_only_the_opening_of_a_docstring_is_shown():
    assert field("inner")["description"] == "Something inside."


def test_required_fields_stay_required():
    assert structural_schema(Outer)["required"] == ["needed"]


@pytest.mark.parametrize("annotation", [int | str, Any])
def test_a_field_without_one_concrete_type_is_refused_by_name(annotation: Any):
    class Vague(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        what: annotation  # type: ignore[valid-type]

    with pytest.raises(SchemaError, match=r"Vague\.what"):
        structural_schema(Vague)


def test_a_keyword_without_structural_form_is_refused_not_dropped():
    class Odd(BaseModel):
        pair: tuple[int, str]

    with pytest.raises(SchemaError, match="prefixItems"):
        structural_schema(Odd)


def test_a_rule_for_a_field_that_is_not_there_is_refused():
    with pytest.raises(SchemaError, match="no field 'missing'"):
        add_rules(structural_schema(Outer), ("inner", "missing"), [{"rule": "true", "message": "x"}])


def test_a_rule_sits_on_its_object():
    schema = structural_schema(Outer)
    add_rules(schema, ("inner",), [{"rule": "self.size > 1", "message": "bigger"}])
    assert schema["properties"]["inner"]["x-kubernetes-validations"] == [{"rule": "self.size > 1", "message": "bigger"}]


def test_constraints_inside_an_optional_are_kept():
    class Root(BaseModel):
        port: Annotated[int, Field(ge=1, le=9)] | None = None

    assert structural_schema(Root)["properties"]["port"] == {"type": "integer", "minimum": 1, "maximum": 9}
