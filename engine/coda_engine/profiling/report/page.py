"""The page around the charts: verdict, domain, held-out errors, keys and provenance; it loads nothing."""

from collections.abc import Iterable, Sequence
from html import escape

from coda_engine.contract.measured import CheckedCosts, HeldOutPoint
from coda_engine.contract.profile import Profile
from coda_engine.profiling.report.chart import COLORS, amount
from coda_engine.profiling.report.curves import Figure, figures
from coda_engine.profiling.report.style import STYLE

_TITLES = {
    "prefill": "Prefill",
    "prefill_grid": "Prefill by context",
    "restore": "Restore from the CPU shadow",
    "load": "Load from SSD",
}


def report_page(profile: Profile) -> str:
    """Return ``profile`` as one HTML document with inline style and SVG charts."""
    key = profile.full_key
    title = f"Profile of {key.spec.model}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(profile))}</p>',
        _verdict(profile),
        *map(_figure, figures(profile)),
        "<h2>Held-out points</h2>",
        '<p class="soft">Measured, but not part of any curve: they judge it.</p>',
        _held_out(profile),
        "<h2>Keys</h2>",
        _keys(profile),
        "<h2>Provenance</h2>",
        _provenance(profile),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _subtitle(profile: Profile) -> str:
    key = profile.full_key
    kind = "quick" if profile.provenance.quick else "full"
    return f"{key.hardware}, vLLM {key.vllm_version}; {kind} profile {profile.digest()}"


def _verdict(profile: Profile) -> str:
    rows = []
    for name, part in profile.parts.items():
        held = not part.misses()
        words = "holds" if held else "misses its bound"
        rows.append(
            (
                _TITLES[name],
                f'<span class="{"good" if held else "bad"}">{words}</span>',
                f"{part.worst_error:.1%}",
                f"{part.error_bound:.0%}",
                f"{part.resolution_ms:.1f} ms" if part.resolution_ms else "",
            )
        )
    domain = profile.domain
    reach = [f"{domain.new_tokens:,} new tokens"]
    if domain.context_tokens:
        reach.append(f"{domain.context_tokens:,} tokens of context")
    if domain.restore_bytes:
        reach.append(
            f"restores of {amount(domain.restore_bytes)}B behind {amount(domain.outstanding_bytes)}B of others"
        )
    absent = [_TITLES[name].lower() for name in ("restore", "load") if name not in profile.parts]
    words = f"Measured up to {', '.join(reach)}; beyond, the last segment is continued."
    if absent:
        words += f" Not measured, so without cost: {', '.join(absent)}."
    head = ("Part", "Held-out check", "Worst error", "Bound", "Noise")
    return _table(head, rows, numbers=(2, 3, 4)) + f"<p>{escape(words)}</p>"


def _figure(figure: Figure) -> str:
    legend = "".join(
        f'<span class="s{number % COLORS}">{escape(name)}</span>' for number, name in enumerate(figure.legend)
    )
    return (
        f"<h2>{escape(figure.title)}</h2>\n"
        f'<p class="soft">{escape(figure.note)} Filled points are medians with their spread; hollow ones were held '
        "out, with a line to what was predicted; the shade is the bound; dashed is extrapolation.</p>\n"
        f'<div class="legend">{legend}</div>\n{figure.svg}'
    )


def _held_out(profile: Profile) -> str:
    rows = [
        (
            _TITLES[name],
            escape(_where(name, point)),
            f"{point.measured_ms:.1f}",
            f"{point.predicted_ms:.1f}",
            _error(part, point),
        )
        for name, part in profile.parts.items()
        for point in part.held_out
    ]
    return _table(("Part", "Point", "Measured ms", "Predicted ms", "Error"), rows, numbers=(2, 3, 4))


def _where(name: str, point: HeldOutPoint) -> str:
    if name in ("restore", "load"):
        return f"{amount(point.x)}B" + (f" beside {point.outstanding} others" if point.outstanding else "")
    return f"{point.x:,} tokens" + (f" on {point.context_tokens:,} of context" if point.context_tokens else "")


def _error(part: CheckedCosts, point: HeldOutPoint) -> str:
    return "within noise" if point.error_ms <= part.resolution_ms else f"{point.relative_error:.1%}"


def _keys(profile: Profile) -> str:
    key = profile.full_key
    fields = key.model_dump(exclude={"spec"})
    rows = [("spec key", f"{key.spec.digest()}")]
    rows += [(f"spec.{name}", str(value)) for name, value in key.spec.model_dump().items() if value != ""]
    rows += [(name, str(value)) for name, value in fields.items() if value != ""]
    return _table(("Field", "Value"), [(escape(name), escape(value)) for name, value in rows])


def _provenance(profile: Profile) -> str:
    origin = profile.provenance
    rows = [
        ("measured", f"{origin.measured_at}, in {origin.duration_s:.0f} s, by Coda {origin.coda_version}"),
        ("schema", str(profile.schema_version)),
        ("size", f"{len(profile.to_json()):,} bytes"),
    ]
    rows += [
        ("held again", f"{check.checked_at} under {check.driver}, {check.runtime}; worst error {check.worst_error:.1%}")
        for check in profile.revalidations
    ]
    return _table(("", ""), [(escape(name), escape(value)) for name, value in rows])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="{"n" if column in numbers else "key"}">{cell}</{tag}>' for column, cell in enumerate(row)
        )

    lines = [cells("th", head)] if any(head) else []
    lines += [cells("td", row) for row in rows]
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
