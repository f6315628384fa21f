"""The systems that are compared: one engine command line, another settings document and CPU shadow each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coda_engine.contract.reasons import Feature

STOCK = "stock"
NAMES = (STOCK, "fifo", "cachewise", "tiered-aging", "coda")
"""``stock`` is vLLM without plug-ins; ``fifo`` adds the CPU shadow; the others also an order of admission."""

_RECLAIM = {"fifo": "lru", "cachewise": "cachewise", "tiered-aging": "tool-aware", "coda": "tool-aware"}
"""What leaves HBM first: each rival keeps its own order, native vLLM's is that of ``fifo``."""


class UnknownSystemError(ValueError):
    """A name on the command line is no system; the message says which there are."""


@dataclass(frozen=True, slots=True)
class System:
    """One way to run the engine.

    Attributes:
        name: As rows carry it.
        plugins: Whether Coda's plug-ins are loaded at all.
        shadow: Whether the engine has a CPU shadow.
        state: ``admission.state`` of its settings document.
        reclaim: ``admission.reclaim`` of it.
    """

    name: str
    plugins: bool = True
    shadow: bool = True
    state: Mapping[str, Any] = field(default_factory=dict)
    reclaim: Mapping[str, Any] = field(default_factory=dict)

    def admission(self) -> dict[str, Any]:
        """Return the ``admission`` group of the settings document."""
        return {"state": dict(self.state), "reclaim": dict(self.reclaim)}

    def describe(self) -> dict[str, Any]:
        """Return everything about the system that a measurement depends on."""
        return {"name": self.name, "plugins": self.plugins, "shadow": self.shadow, "admission": self.admission()}

    def needed(self) -> set[Feature]:
        """Return the features without which an engine is not this system."""
        features = {Feature.KV_SHADOW} if self.shadow else set()
        return features | ({Feature.STATE_ADMISSION} if self.state.get("policy", "fifo") != "fifo" else set())


def system(text: str) -> System:
    """Return the system of a name, optionally with changed constants: ``coda`` or ``coda+tauMs=20000+maxWaitMs=60000``.

    Raises:
        UnknownSystemError: No such system, or a change that is not ``name=number`` or ``name=true``.
    """
    name, *changes = text.split("+")
    if name not in NAMES:
        raise UnknownSystemError(f"no system {name}; there are: {', '.join(NAMES)}")
    if name == STOCK:
        if changes:
            raise UnknownSystemError("stock has no settings to change")
        return System(STOCK, plugins=False, shadow=False)
    state = {"policy": name, **dict(_change(change) for change in changes)}
    return System(text, state=state, reclaim={"policy": _RECLAIM[name]})


def systems(text: str) -> list[System]:
    """Return the systems of a list separated by commas, each once, in its order.

    Raises:
        UnknownSystemError: As :func:`system`; or the list is empty.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UnknownSystemError(f"no system is named; there are: {', '.join(NAMES)}")
    return [system(name) for name in names]


def _change(text: str) -> tuple[str, int | float | bool]:
    name, _, value = text.partition("=")
    try:
        changed = json.loads(value)
    except ValueError:
        changed = None
    if not isinstance(changed, int | float):
        raise UnknownSystemError(f"{text!r} is not name=number or name=true/false, for example coda+tauMs=20000")
    return name, changed
