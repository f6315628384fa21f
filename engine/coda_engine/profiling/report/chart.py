"""A chart as inline SVG: lines, measured points with their spread, held-out points with their error, bounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 340
COLORS = 6
"""Series colours that the page's style sheet has (``.s0`` ...); further series begin again."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 46
_TICKS = 6


@dataclass(frozen=True, slots=True)
class Line:
    """A curve.

    Attributes:
        series: Number of its colour.
        points: (x, y), x growing.
        dashed: It was not measured there: extrapolation.
    """

    series: int
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """The area between a lower and an upper bound.

    Attributes:
        series: Number of its colour.
        edges: (x, lower, upper), x growing.
    """

    series: int
    edges: Sequence[tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point.

    Attributes:
        series: Number of its colour.
        x: Its place.
        y: Its place.
        reach: From where to where the thin line through it goes: spread, or measured to predicted.
        hollow: It was held out.
        text: What a pointer over it is told.
    """

    series: int
    x: float
    y: float
    reach: tuple[float, float]
    hollow: bool
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the chart.

    Attributes:
        label: What it counts.
        low: Value at its beginning.
        high: Value at its end.
        log: Logarithmic; needs ``low`` > 0.
    """

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, label: str, values: Sequence[float], *, log: bool) -> "Axis":
        """Return an axis that shows all of ``values`` (from 0 unless logarithmic)."""
        if log:
            positive = [value for value in values if value > 0]
            return cls(label, min(positive) / 1.25, max(positive) * 1.25, log=True)
        return cls(label, 0.0, max(*values, 1e-9) * 1.08)

    def share(self, value: float) -> float:
        """Return how far along the axis a value is, 0 to 1; values outside are at the nearest end."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            share = (math.log(max(value, self.low)) - low) / (high - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return round values along the axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return [value for value in values if self.low <= value <= self.high]
        step = _round_step((self.high - self.low) / _TICKS)
        return [number * step for number in range(math.floor(self.high / step) + 1)]


def chart(x: Axis, y: Axis, items: Sequence[Line | Band | Mark], description: str) -> str:
    """Return the SVG element; ``description`` is its text for those who cannot see it."""
    drawn = [_grid(x, y)]
    for kind in (Band, Line, Mark):
        drawn += [_draw(item, x, y) for item in items if isinstance(item, kind)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description, quote=True)}">'
        + "".join(drawn)
        + "</svg>"
    )


def amount(value: float) -> str:
    """Return a number as axis labels and tables show it."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 10 or (abs(value) >= limit and value % (limit / 10) == 0):
            return f"{value / limit:.3g}{unit}"
    return f"{value:.4g}"


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


def _draw(item: Line | Band | Mark, x: Axis, y: Axis) -> str:
    color = f"s{item.series % COLORS}"
    match item:
        case Band(edges=edges):
            around = [(place, upper) for place, _, upper in edges]
            around += [(place, lower) for place, lower, _ in reversed(edges)]
            return f'<polygon class="band {color}" points="{_path(around, x, y)}"/>'
        case Line(points=points, dashed=dashed):
            dash = " dashed" if dashed else ""
            return f'<polyline class="line {color}{dash}" points="{_path(points, x, y)}"/>'
        case Mark():
            left, top = _place(item.x, item.y, x, y)
            ends = [_place(item.x, end, x, y)[1] for end in item.reach]
            kind = "hollow" if item.hollow else "point"
            return (
                f'<g class="{color}"><title>{escape(item.text)}</title>'
                f'<line class="reach" x1="{left}" x2="{left}" y1="{ends[0]}" y2="{ends[1]}"/>'
                f'<circle class="{kind}" cx="{left}" cy="{top}" r="4"/></g>'
            )


def _grid(x: Axis, y: Axis) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for tick in y.ticks():
        top = _place(x.low, tick, x, y)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{top}" y2="{top}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{top + 4}" text-anchor="end">{amount(tick)}</text>')
    for tick in x.ticks():
        left = _place(tick, y.low, x, y)[0]
        parts.append(f'<line class="grid" x1="{left}" x2="{left}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{left}" y="{bottom + 18}" text-anchor="middle">{amount(tick)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
    )
    parts.append(
        f'<text class="label" x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    return " ".join("{},{}".format(*_place(*point, x, y)) for point in points)


def _place(x_value: float, y_value: float, x: Axis, y: Axis) -> tuple[float, float]:
    left = _LEFT + x.share(x_value) * (WIDTH - _LEFT - _RIGHT)
    top = HEIGHT - _BOTTOM - y.share(y_value) * (HEIGHT - _TOP - _BOTTOM)
    return round(left, 1), round(top, 1)
