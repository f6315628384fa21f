"""A clock that a test moves by hand."""


class HandClock:
    """Called, it tells ``now_s``."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
