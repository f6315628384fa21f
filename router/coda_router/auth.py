"""API keys: a folder of files, each named after its tenant and holding that tenant's key."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from coda_router.errors import ConfigurationError, Refusal

MIN_KEY_CHARS = 8
"""Shortest API key that is accepted."""


class ApiKeys:
    """The tenants' keys, kept only as keyed hashes.

    The hash's key is random for each process: nobody outside can choose what a presented key hashes to, so the
    time that a look-up takes tells nothing about any API key.

    Args:
        keys: Tenant to API key; empty = everybody is let in as the tenant ``""``.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._hash_key = secrets.token_bytes(32)
        self._tenants = {self._digest(key.encode()): tenant for tenant, key in keys.items()}

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return not self._tenants

    def tenant_of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return whose key the request carries, as ``Authorization: Bearer`` or ``x-api-key``.

        Raises:
            Refusal: 401; no key, or an unknown one.
        """
        if not self._tenants:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        presented = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not presented:
            raise Refusal(401, "missing_api_key", "no API key given; send Authorization: Bearer KEY")
        tenant = self._tenants.get(self._digest(presented))
        if tenant is None:
            raise Refusal(401, "invalid_api_key", "the API key is not known here")
        return tenant

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._hash_key).digest()


def read_api_keys(folder: Path) -> dict[str, str]:
    """Return tenant to API key for every file in ``folder`` (those that start with a dot are not tenants).

    Raises:
        ConfigurationError: The folder cannot be read, holds no key, an empty or short one, or one key twice.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        keys = {path.name: path.read_text().strip() for path in files}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-keys-dir {folder}: cannot be read: {error}") from error
    if not keys:
        raise ConfigurationError(f"--api-keys-dir {folder}: holds no key; put one file there for each tenant")
    uses = Counter(keys.values())
    for tenant, key in keys.items():
        if len(key) < MIN_KEY_CHARS:
            raise ConfigurationError(
                f"--api-keys-dir {folder}: the key in file {tenant!r} has fewer than {MIN_KEY_CHARS} characters"
            )
        if uses[key] > 1:
            raise ConfigurationError(f"--api-keys-dir {folder}: file {tenant!r} holds another tenant's key")
    return keys
