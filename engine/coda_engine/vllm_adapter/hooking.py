"""Marks what Coda has wrapped: vLLM may load the plug-in more than once in a process, and nothing is hooked twice."""

from collections.abc import Callable
from typing import Any

_MARK = "coda_hooked"


def is_hooked(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` is one of Coda's wrappers, or wraps one."""
    return hasattr(function, _MARK)


def mark_hooked(wrapper: Callable[..., Any]) -> None:
    """Mark ``wrapper`` as Coda's."""
    setattr(wrapper, _MARK, True)
