"""The router's benchmark: its figures from samples, and a very short real run."""

import json

import pytest
from click.testing import CliRunner

from coda_bench.router import command
from coda_bench.router.cases import AGENT, FULL, QUICK, SATURATED, Case
from coda_bench.router.figures import rows_of
from coda_bench.router.measure import Sample, measure
from coda_bench.router.placement import placement_rows
from coda_bench.router.sessions import session_rows
from coda_bench.router.systems import DIRECT, coda
from coda_engine.contract.settings import PlacementPolicyName


def sample(system: str, repetition: int, ttft_ms: float, cpu: float = 0.0, errors: int = 0) -> Sample:
    return Sample("2KB/c20", system, repetition, 100, errors, 50.0, ttft_ms, ttft_ms * 2, cpu, 60.0)


def test_cases_have_the_names_that_rows_carry():
    assert [case.name for case in QUICK] == ["2KB/c20", "2KB/c20/saturated"]
    assert "220KB/c100" in {case.name for case in FULL}
    assert len({case.name for case in FULL}) == len(FULL)


def test_added_latency_is_the_difference_to_direct_requests_of_the_same_repetition():
    samples = [
        sample("coda", 1, 45.0, cpu=2.0),
        sample("direct", 0, 40.0),
        sample("coda", 0, 41.0, cpu=1.0),
        sample("direct", 1, 43.0),
        sample("peer", 0, 44.0, cpu=2.0),
        sample("peer", 1, 46.0, cpu=4.0, errors=3),
    ]
    rows = {(row.system, row.metric): row for row in rows_of(samples, base="peer", machine="m")}
    assert rows["coda", "added_ttft_p50"].value == pytest.approx(1.5)
    assert rows["coda", "added_ttft_p99"].value == pytest.approx(3.0)
    assert rows["coda", "cpu_s_per_1k"].ratio == pytest.approx(0.5)
    assert rows["coda", "cpu_s_per_1k"].ratio_to == "peer"
    assert rows["peer", "cpu_s_per_1k"].ratio is None
    assert rows["peer", "errors"].value == 3
    assert ("direct", "rss_mb") not in rows


@pytest.mark.stress
def test_a_short_real_run_gives_figures_without_errors():
    cases = [Case(2048, 4, AGENT), Case(131_072, 4, SATURATED)]
    samples = measure(cases, [DIRECT, coda()], repetitions=1, duration_s=0.6, tell=lambda line: None)
    rows = rows_of(samples, base=None, machine="here")
    assert {row.case for row in rows} == {"2KB/c4", "128KB/c4/saturated"}
    assert all(row.value == 0 for row in rows if row.metric == "errors")
    assert all(row.value > 0 for row in rows if row.metric in {"req_per_s", "cpu_s_per_1k", "rss_mb"})
    assert json.dumps([row.value for row in rows])


def test_the_memory_of_sessions_stands_still_once_it_is_full():
    rows = {row.metric: row for row in session_rows("here", sessions=50_000)}
    assert rows["session_bytes"].case == "sessions/50000"
    assert 20 < rows["session_bytes"].value < 200
    assert abs(rows["further_session_bytes"].value) < 5
    assert rows["place_us"].value > 0


def test_every_policy_s_placement_is_measured():
    rows = placement_rows("here", engines=3, sessions=90, decisions=200)
    assert {row.system for row in rows} == {policy.value for policy in PlacementPolicyName}
    assert {row.metric for row in rows} == {"decision_p50", "decision_p99", "assign_p50", "assign_p99"}
    assert {row.case for row in rows} == {"placement/3x90"}
    assert all(row.value > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "expected"), [(["--case", "9KB/c9"], "there are: 2KB/c20"), (["--systems", "nginx"], "unknown: nginx")]
)
def test_unknown_cases_and_systems_are_named(options: list[str], expected: str):
    result = CliRunner().invoke(command.router, options)
    assert result.exit_code == 2
    assert expected in result.stderr
