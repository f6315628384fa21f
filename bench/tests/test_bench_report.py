"""The form of all benchmarks: rows, ratios, files and tables."""

import json
from dataclasses import fields

import pytest

from coda_bench.report import Kind, Row, machine_description, paired_ratio, table, write_jsonl


def test_a_row_has_the_fields_that_every_benchmark_shares(tmp_path):
    path = tmp_path / "out" / "figures.jsonl"
    write_jsonl([Row("router", "2KB/c20", "rss_mb", "coda", 64.5, "MB", kind=Kind.MODELLED)], path)
    (line,) = path.read_text().splitlines()
    assert list(json.loads(line)) == [
        "bench", "case", "metric", "system", "value", "unit", "ratio_to", "ratio", "ratio_low", "ratio_high", "reps",
        "kind", "model", "machine",
    ]  # fmt: skip
    assert list(json.loads(line)) == [field.name for field in fields(Row)]
    assert json.loads(line)["kind"] == "modelled"


def test_a_paired_ratio_is_the_geometric_mean_with_its_interval():
    ratio = paired_ratio([2.0, 8.0], [1.0, 2.0])
    assert ratio.ratio == pytest.approx(8**0.5)
    assert ratio.low == pytest.approx(2.0)
    assert ratio.high == pytest.approx(4.0)


def test_equal_figures_have_an_interval_of_no_width():
    ratio = paired_ratio([3.0, 3.0, 3.0], [2.0, 2.0, 2.0])
    assert (ratio.low, ratio.high) == (pytest.approx(1.5), pytest.approx(1.5))


@pytest.mark.parametrize(("values", "base"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_figures_that_make_no_ratio_are_refused(values: list[float], base: list[float]):
    with pytest.raises(ValueError, match="positive figures"):
        paired_ratio(values, base)


def test_the_table_shows_ratios_where_there_are_any():
    rows = [
        Row("router", "c", "m", "coda", 1.5, "ms", "vllm-router", 0.5, 0.4, 0.6),
        Row("router", "c", "m", "direct", 1234.4, "1/s"),
    ]
    lines = table(rows).splitlines()
    assert lines[1].endswith("0.50 (0.40-0.60) x vllm-router")
    assert "1234" in lines[2]
    assert "x " not in lines[2]


def test_a_machine_is_described_also_where_proc_is_missing(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Fast One\nprocessor\t: 1\nmodel name\t: Fast One\n"
    )
    (tmp_path / "meminfo").write_text("MemTotal:       4194304 kB\n")
    assert machine_description(tmp_path / "cpuinfo", tmp_path / "meminfo").startswith("Fast One, 2 CPUs, 4 GiB")
    assert "0 CPUs" in machine_description(tmp_path / "no", tmp_path / "nothing")
