"""Pydantic's JSON schema to the structural schema that Kubernetes asks of a custom resource.

Kubernetes takes a subset of OpenAPI v3: no references, no ``additionalProperties: false`` (unknown fields
are refused or pruned by the API server itself), a boolean ``exclusiveMinimum``, no ``const``. Everything
that this converter does not know is an error: a keyword dropped in silence would be a check that no
longer happens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from coda_operator.errors import SchemaError

JsonSchema = Mapping[str, Any]

# fmt: off
_COPIED = frozenset({
    "type", "description", "default", "enum", "pattern", "format", "minimum", "maximum", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "required", "uniqueItems",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields",
})
# fmt: on
_DROPPED = frozenset({"title", "$defs", "examples"})
_INT_OR_STRING = "x-kubernetes-int-or-string"
_PRESERVE = "x-kubernetes-preserve-unknown-fields"


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of ``model`` as authored in YAML (aliases are the field names).

    Raises:
        SchemaError: The model uses something that has no structural form; names the field.
    """
    schema = model.model_json_schema(by_alias=True)
    return _Converter(schema.get("$defs", {})).convert(schema, model.__name__)


class _Converter:
    """Converts one document's schema; holds its definitions, because references are written out."""

    def __init__(self, definitions: Mapping[str, JsonSchema]) -> None:
        self._definitions = definitions

    def convert(self, schema: JsonSchema, path: str) -> dict[str, Any]:
        """Return ``schema`` in structural form; ``path`` is only for messages."""
        schema = self._without_indirection(schema, path)
        if schema.get(_INT_OR_STRING):
            return _int_or_string(schema)
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            result |= self._keyword(keyword, value, path)
        if "type" not in result and not result.get(_PRESERVE):
            raise SchemaError(f"{path}: no type; annotate the field with one concrete type")
        if "default" in result:
            # Written out whole: the API server checks the rules between fields on the default as it stands here.
            result["default"] = _without_nulls(result["default"])
        return result

    def _without_indirection(self, schema: JsonSchema, path: str) -> dict[str, Any]:
        """Return ``schema`` with its reference or its only non-null alternative in place.

        ``Optional`` fields stay plain: leaving a field out says the same as null, and CEL's ``has`` is
        simple when there is one way to say it.
        """
        merged = dict(schema)
        for keyword in ("anyOf", "allOf", "oneOf"):
            alternatives = merged.pop(keyword, None)
            if alternatives is None:
                continue
            concrete = [item for item in alternatives if item.get("type") != "null"]
            if len(concrete) != 1:
                raise SchemaError(f"{path}: {keyword} of {len(concrete)} types; Kubernetes needs exactly one")
            merged = {**concrete[0], **merged}
        if merged.get("default", "") is None:
            del merged["default"]
        if "$ref" in merged:
            name = merged.pop("$ref").removeprefix("#/$defs/")
            return self._without_indirection({**self._definitions[name], **merged}, path)
        return merged

    def _keyword(self, keyword: str, value: Any, path: str) -> dict[str, Any]:
        match keyword:
            case "properties":
                return {keyword: {name: self.convert(item, f"{path}.{name}") for name, item in value.items()}}
            case "items":
                return {keyword: self.convert(value, f"{path}[]")}
            case "additionalProperties":
                return self._additional_properties(value, path)
            case "const":
                return {"enum": [value]}
            case "exclusiveMinimum":
                return {"minimum": value, "exclusiveMinimum": True}
            case "exclusiveMaximum":
                return {"maximum": value, "exclusiveMaximum": True}
            case "description":
                return {keyword: _first_paragraph(value)}
            case _ if keyword in _COPIED:
                return {keyword: value}
            case _ if keyword in _DROPPED:
                return {}
        raise SchemaError(f"{path}: no structural form for the keyword {keyword!r}")

    def _additional_properties(self, value: Any, path: str) -> dict[str, Any]:
        if value is False:
            return {}
        if value is True:
            return {_PRESERVE: True}
        return {"additionalProperties": self.convert(value, f"{path}.*")}


def _int_or_string(schema: JsonSchema) -> dict[str, Any]:
    """Return Kubernetes' own form of a quantity: ``5`` and ``"5Gi"`` are both valid."""
    kept = {name: schema[name] for name in ("description", "default", "pattern") if name in schema}
    return {"anyOf": [{"type": "integer"}, {"type": "string"}], _INT_OR_STRING: True} | kept


def _without_nulls(default: Any) -> Any:
    """Return ``default`` without the optional fields that it leaves out."""
    if isinstance(default, Mapping):
        return {name: _without_nulls(value) for name, value in default.items() if value is not None}
    return default


def _first_paragraph(text: str) -> str:
    """Return what ``kubectl explain`` should show: a docstring's opening, not its list of attributes."""
    return " ".join(text.split("\n\n", 1)[0].split())


def add_rules(schema: dict[str, Any], path: Sequence[str], rules: Sequence[Mapping[str, str]]) -> None:
    """Put CEL ``rules`` on the object at ``path`` (property names from the root).

    Raises:
        SchemaError: There is no such field, so the rule would protect nothing.
    """
    target = schema
    for name in path:
        if name not in target.get("properties", {}):
            raise SchemaError(f"rule for {'.'.join(path)}: no field {name!r}")
        target = target["properties"][name]
    target.setdefault("x-kubernetes-validations", []).extend(dict(rule) for rule in rules)
