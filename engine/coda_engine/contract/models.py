"""The pydantic bases of every document that crosses a process boundary, by who writes it and where it is kept."""

import hashlib
import json
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from coda_engine.contract.errors import DocumentError, describe_validation_error


class AuthoredModel(BaseModel):
    """A document that a person writes (YAML, CRD, settings): camelCase, unknown fields refused.

    Code builds these by their Python names; documents are parsed with ``by_name=False``, so that everything
    reads the same spelling that the CRD asks for.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    @classmethod
    def from_plain(cls, document: object, name: str) -> Self:
        """Return the document in plain values, as YAML or Kubernetes gives them.

        Types are as strict as an API server's: ``"2"`` is no number.

        Args:
            document: Dictionaries, lists, texts, numbers.
            name: Put before every field in messages, for example ``spec``.

        Raises:
            DocumentError: One line for each wrong field: its path, what is allowed, what was given.
        """
        # A YAML value that JSON does not have (a date) becomes one that fits no field, so that the field is named.
        return cls.from_authored_json(json.dumps(document, default=lambda value: [str(value)]), name)

    @classmethod
    def from_authored_json(cls, data: bytes | str, name: str, *, with_values: bool = True) -> Self:
        """Return the document in JSON text; as :meth:`from_plain`.

        Args:
            data: The text.
            name: As in :meth:`from_plain`.
            with_values: Whether messages repeat what was given; not where it may be a secret.

        Raises:
            DocumentError: ``data`` is not JSON, or as in :meth:`from_plain`.
        """
        try:
            return cls.model_validate_json(data, strict=True, by_alias=True, by_name=False)
        except ValidationError as error:
            raise DocumentError(describe_validation_error(error, name, with_values=with_values)) from error


class ReportedModel(BaseModel):
    """What processes write into Kubernetes objects: camelCase, unknown fields of newer writers ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class WireModel(BaseModel):
    """A document that processes exchange: snake_case, unknown fields of newer writers ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Return the document in ``data``.

        Raises:
            DocumentError: ``data`` is not JSON or does not fit; the message names each field.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DocumentError(describe_validation_error(error, cls.__name__)) from error

    def to_json(self) -> bytes:
        """Return the document as compact JSON."""
        return self.model_dump_json().encode()


def canonical_digest(document: BaseModel) -> str:
    """Return the first 16 hex digits of the SHA-256 of the document's canonical JSON.

    Canonical: aliases, sorted keys, no white space; two documents that mean the same have one digest.
    """
    content = json.dumps(document.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]
