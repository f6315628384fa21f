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
