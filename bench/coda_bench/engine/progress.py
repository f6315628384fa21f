"""How far a benchmark is and how long it will still take."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Tells what is measured, with the time left.

    Attributes:
        tell: Gets a line for each step.
        clock: Monotonic seconds.
        planned_s: Expected time of everything not yet begun or going on, seconds.
        spent_s: Time that finished steps took, seconds.
        expected_s: Time that they had been expected to take, seconds.
    """

    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    planned_s: float = 0.0
    spent_s: float = 0.0
    expected_s: float = 0.0
    _open: tuple[float, float] | None = field(default=None)

    def plan(self, seconds: float) -> None:
        """Add work that is expected to take ``seconds``."""
        self.planned_s += seconds

    def begin(self, text: str, seconds: float) -> None:
        """Say that a step of the plan begins, which ends the one before."""
        self.end()
        self.tell(f"{text} ({self.left()})")
        self._open = (self.clock(), seconds)

    def skip(self, text: str, seconds: float) -> None:
        """Say that a step of the plan was finished earlier."""
        self.planned_s -= seconds
        self.tell(f"{text}: kept from before")

    def end(self) -> None:
        """Close the step that is going on, if any."""
        if self._open is None:
            return
        began_s, expected_s = self._open
        self._open = None
        self.planned_s -= expected_s
        self.spent_s += self.clock() - began_s
        self.expected_s += expected_s

    def left(self) -> str:
        """Return the time left in words, corrected by how steps have taken longer or shorter than expected."""
        pace = self.spent_s / self.expected_s if self.expected_s > 0 else 1.0
        left_s = max(0.0, self.planned_s) * pace
        return f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"about {left_s:.0f} s left"
