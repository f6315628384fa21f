"""The charts of a profile's parts: what was measured, what the engine's cost model makes of it, and the bound."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from coda_engine.contract.measured import CheckedCosts, CurvePoint, HeldOutPoint
from coda_engine.contract.profile import Profile
from coda_engine.policy.cost import StateCostModel, cost_model
from coda_engine.profiling.report.chart import Axis, Band, Line, Mark, amount, chart

_BEYOND = 1.25
"""How far beyond the last measured point the extrapolation is drawn."""

_SAMPLES = 60


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart.

    Attributes:
        name: What the legend says.
        cost_ms: The cost model's answer along it.
        points: Measured points that it was built from.
        held_out: Held-out points near it; empty when they lie between curves.
    """

    name: str
    cost_ms: Callable[[float], float]
    points: Sequence[CurvePoint]
    held_out: Sequence[HeldOutPoint] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with what is written around it.

    Attributes:
        title: Heading.
        note: A sentence on how to read it.
        legend: Names of the series, in the order of their colours.
        svg: The chart.
    """

    title: str
    note: str
    legend: tuple[str, ...]
    svg: str


def figures(profile: Profile) -> Iterator[Figure]:
    """Yield a figure for each part that the profile has."""
    model = cost_model(profile)
    yield _prefill(profile, model)
    if profile.prefill_grid is not None:
        yield _grid(profile, model)
    if profile.restore is not None:
        yield _restore(profile, model)
    if profile.load is not None:
        load = Series(
            "load", lambda x: model.load.at(x) if model.load else 0.0, profile.load.points, profile.load.held_out
        )
        yield _figure("Load from SSD", "SSD to HBM.", [load], "bytes", profile.load)


def _prefill(profile: Profile, model: StateCostModel) -> Figure:
    curve = profile.prefill
    series = Series("no context", model.prefill.at, curve.points, curve.held_out)
    note = "The paper's curve: time against tokens without reusable KV."
    return _figure("Prefill", note, [series], "new tokens", curve, log=True)


def _grid(profile: Profile, model: StateCostModel) -> Figure:
    grid, surface = profile.prefill_grid, model.surface
    if grid is None or surface is None:
        raise ValueError("the profile has no prefill grid")

    def on(context_tokens: int) -> Callable[[float], float]:
        return lambda new_tokens: surface.at(new_tokens, context_tokens)

    series = [
        Series(f"on {row.context_tokens:,} tokens of context", on(row.context_tokens), row.points) for row in grid.rows
    ]
    between = [
        Series(f"held out: on {point.context_tokens:,}", on(point.context_tokens), [], [point])
        for point in grid.held_out
    ]
    note = "The same new tokens cost more behind a longer context. Held-out points lie between the rows."
    return _figure("Prefill by context", note, [*series, *between], "new tokens", grid, log=True)


def _restore(profile: Profile, model: StateCostModel) -> Figure:
    restore, cost = profile.restore, model.restore
    if restore is None or cost is None:
        raise ValueError("the profile has no restore curves")

    def beside(others: int) -> Callable[[float], float]:
        return lambda size: cost.at(round(size), round(size) * others)

    depths = {curve.outstanding: curve.points for curve in restore.curves}
    judged = sorted({point.outstanding for point in restore.held_out} | set(depths))
    series = [
        Series(
            f"beside {others} others" if others else "alone",
            beside(others),
            depths.get(others, []),
            [point for point in restore.held_out if point.outstanding == others],
        )
        for others in judged
    ]
    note = (
        "Time until a restored prompt's first token beyond that of the same prompt in HBM, alone and behind others of "
        "the same size."
    )
    return _figure("Restore from the CPU shadow", note, series, "bytes of one restore", restore)


def _figure(
    title: str, note: str, series: Sequence[Series], unit: str, costs: CheckedCosts, *, log: bool = False
) -> Figure:
    measured = [(point.x, point.ms) for one in series for point in one.points]
    judged = [
        (point.x, ms) for one in series for point in one.held_out for ms in (point.measured_ms, point.predicted_ms)
    ]
    last_x = max(x for x, _ in (*measured, *judged)) * _BEYOND
    ends_ms = [one.cost_ms(last_x) for one in series if one.points]
    x = Axis.around(unit, [place for place, _ in measured] + [last_x], log=log)
    y = Axis.around("milliseconds", [ms for _, ms in (*measured, *judged)] + ends_ms, log=log)
    items = [
        item
        for number, one in enumerate(series)
        for item in (*_drawn_curve(number, one, last_x, costs, log=log), *_marks(number, one))
    ]
    return Figure(title, note, tuple(one.name for one in series), chart(x, y, items, f"{title}: {note}"))


def _drawn_curve(number: int, one: Series, last_x: float, costs: CheckedCosts, *, log: bool) -> Iterator[Line | Band]:
    """Yield the curve between its measured points, what a held-out point may be off there, and the extrapolation."""
    if not one.points:
        return
    first, end = one.points[0].x, one.points[-1].x
    shares = [step / _SAMPLES for step in range(_SAMPLES + 1)]
    inside = [first * (end / first) ** share if log else first + (end - first) * share for share in shares]
    curve = [(x, one.cost_ms(x)) for x in inside]
    off = [(x, ms, max(ms * costs.error_bound, costs.resolution_ms)) for x, ms in curve]
    yield Band(number, [(x, ms - wrong, ms + wrong) for x, ms, wrong in off])
    yield Line(number, curve)
    yield Line(number, [(x, one.cost_ms(x)) for x in (end, last_x)], dashed=True)


def _marks(number: int, one: Series) -> Iterator[Mark]:
    for point in one.points:
        text = (
            f"{one.name}: {amount(point.x)}: {point.ms:.1f} ms, spread {point.spread_ms:.1f}, {point.repetitions} times"
        )
        spread = (max(0.0, point.ms - point.spread_ms), point.ms + point.spread_ms)
        yield Mark(number, point.x, point.ms, spread, False, text)
    for judge in one.held_out:
        text = (
            f"held out, {one.name}: {amount(judge.x)}: measured {judge.measured_ms:.1f} ms, "
            f"predicted {judge.predicted_ms:.1f} ms"
        )
        yield Mark(number, judge.x, judge.measured_ms, (judge.measured_ms, judge.predicted_ms), True, text)
