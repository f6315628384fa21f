"""The JSON document that a key's file may hold, and new keys."""

import hashlib
import secrets
from typing import Self

from pydantic import Field, model_validator

from coda_engine.contract.models import AuthoredModel

MIN_KEY_CHARS = 8
"""Shortest API key that is accepted."""

NEW_KEY_BYTES = 32
"""Random bytes of a new key: a plain hash of so many cannot be searched for, so hashes need no salt."""

_HASH_PREFIX = "sha256:"


class KeyDocument(AuthoredModel):
    """One API key: the key itself or its hash, whose it is, and what it may do."""

    key: str | None = Field(
        default=None,
        min_length=MIN_KEY_CHARS,
        pattern=r"^[!-~]*$",
        description="The key as clients send it: plain characters, no spaces.",
    )
    key_hash: str | None = Field(
        default=None,
        pattern=rf"^{_HASH_PREFIX}[0-9a-f]{{64}}$",
        description="Instead of the key: sha256: and the hex digits of its SHA-256.",
    )
    tenant: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,253}$",
        description="Whose key it is; a tenant may have several. Absent: the file's name.",
    )
    models: frozenset[str] | None = Field(
        default=None,
        min_length=1,
        description="Names of models that the key may use; for it the others do not exist. Absent: all.",
    )
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Requests that may begin in a minute, of which as many at once after a minute's rest. "
        "Absent: no limit.",
    )
    max_concurrent_requests: int | None = Field(
        default=None, ge=1, le=100_000, description="Requests that may be under way at once. Absent: no limit."
    )

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if (self.key is None) == (self.key_hash is None):
            raise ValueError("give either key or keyHash; coda key makes both")
        return self

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the key, 32 bytes."""
        if self.key is not None:
            return sha256_of(self.key.encode())
        return bytes.fromhex((self.key_hash or "").removeprefix(_HASH_PREFIX))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return the key in a JSON document.

        Raises:
            DocumentError: Not JSON, an unknown field or an impossible value; names each field, and repeats no
                value, which may be a key.
        """
        return cls.from_authored_json(data, "", with_values=False)


def new_key() -> str:
    """Return a key that nobody has."""
    return f"coda-{secrets.token_urlsafe(NEW_KEY_BYTES)}"


def hashed(key: str) -> str:
    """Return what a document's ``keyHash`` is for ``key``."""
    return _HASH_PREFIX + sha256_of(key.encode()).hex()


def sha256_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key as it came on the wire, 32 bytes."""
    return hashlib.sha256(key).digest()
