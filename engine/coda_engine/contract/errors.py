"""Errors of the contracts.

::

    ContractError
    ├── DocumentError        a document (snapshot, profile, settings) that cannot be read
    ├── IdentityError        an identity value that is malformed or not signed by this cluster
    └── ProfileRefusedError  a readable profile that is not for this engine; carries its Reason
"""

from collections.abc import Iterable

from pydantic import ValidationError

from coda_engine.contract.reasons import Reason


class ContractError(ValueError):
    """Base of every error raised by ``coda_engine.contract``."""


class DocumentError(ContractError):
    """A document cannot be read; the message names each field, what is allowed and what was given."""


class IdentityError(ContractError):
    """An identity value is malformed, of an unknown version, or not signed with this secret."""


class ProfileRefusedError(ContractError):
    """A profile was measured elsewhere or failed its own validation.

    Attributes:
        reason: Why, as logged, counted and shown in conditions.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


MAX_SHOWN_CHARS = 120
"""Longest value that is repeated in a message: messages go on into logs, snapshots and conditions."""


def field_path(location: Iterable[int | str]) -> str:
    """Return a pydantic error location the way a person writes it: ``spec.tiers[2].name``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def describe_validation_error(error: ValidationError, root: str, *, with_values: bool = True) -> str:
    """Return one line for each wrong field: its path, what is allowed, what was given.

    Args:
        error: What pydantic raised.
        root: The document's name or path prefix, for example ``spec``; put before every field.
        with_values: Whether what was given is repeated; not where it may be a secret.
    """
    lines = []
    for item in error.errors(include_url=False):
        path = field_path((root, *item["loc"])) if root else field_path(item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown field; remove it or check its spelling")
            continue
        message = item["msg"].removeprefix("Value error, ")
        # Text that is no JSON at all is the whole document, not a field's value.
        is_shown = (
            with_values
            and item["type"] not in ("missing", "json_invalid")
            and not isinstance(item.get("input"), dict | list)
        )
        shown = f" (given: {_shortened(repr(item.get('input')))})" if is_shown else ""
        lines.append(f"{path}: {message[:1].lower()}{message[1:]}{shown}")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
