"""Reads a folder of API keys: a file is a key, as plain text or as a JSON document."""

from pathlib import Path

from coda_engine.contract.errors import DocumentError
from coda_router.auth.documents import MIN_KEY_CHARS, KeyDocument, sha256_of
from coda_router.auth.keys import ApiKey
from coda_router.auth.limits import KeyLimits
from coda_router.errors import ConfigurationError

MAX_FILE_BYTES = 64 * 1024
"""Largest file that is taken for a key."""

_PLAIN = frozenset(range(ord("!"), ord("~") + 1))


def read_api_keys(folder: Path) -> list[ApiKey]:
    """Return the key of every file in ``folder``, by name (those that start with a dot are none).

    Raises:
        ConfigurationError: The folder cannot be read or holds no key, or a file is not one; names the file and its
            field, never a key.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise ConfigurationError(f"--api-keys-dir {folder}: cannot be read: {error}") from error
    if not files:
        raise ConfigurationError(f"--api-keys-dir {folder}: holds no key; put one file there for each key")
    keys: dict[bytes, ApiKey] = {}
    files_of: dict[bytes, str] = {}
    for path in files:
        try:
            key = _read(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--api-keys-dir {folder}: file {path.name!r}: {_one_line(error)}") from error
        if key.sha256 in keys:
            raise ConfigurationError(
                f"--api-keys-dir {folder}: file {path.name!r}: holds the same key as file {files_of[key.sha256]!r}; "
                "give every key one file"
            )
        keys[key.sha256], files_of[key.sha256] = key, path.name
    return list(keys.values())


def _read(path: Path) -> ApiKey:
    """Return the key in a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no key; the message repeats nothing of the content.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1).strip()
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"is larger than {MAX_FILE_BYTES} bytes; that is no key")
    if content.startswith(b"{"):
        return _of_document(KeyDocument.parse(content), path.name)
    if len(content.decode()) < MIN_KEY_CHARS:
        raise ValueError(f"the key has fewer than {MIN_KEY_CHARS} characters; make one with coda key")
    if not all(byte in _PLAIN for byte in content):
        raise ValueError("more than a key stands there: put the key alone on one line, or the JSON document alone")
    return ApiKey(sha256_of(content), tenant=path.name)


def _of_document(document: KeyDocument, file_name: str) -> ApiKey:
    return ApiKey(
        document.sha256,
        tenant=document.tenant or file_name,
        models=document.models,
        limits=KeyLimits(document.requests_per_minute, document.max_concurrent_requests),
    )


def _one_line(error: Exception) -> str:
    if isinstance(error, DocumentError):
        return "; ".join(str(error).splitlines())
    return str(error)
