"""From runs to rows, the paper's figures beside them, and what the command line refuses."""

import json
import os
import subprocess

import pytest
from click.testing import CliRunner

from coda_bench.engine import command, idle, restart, restore, selection
from coda_bench.engine.cases import FULL, FleetCase, SessionsCase
from coda_bench.engine.fleet import expected_s as fleet_expected_s
from coda_bench.engine.fleet import known_placements
from coda_bench.engine.paper import CLAIMS, beside
from coda_bench.engine.records import RequestRecord
from coda_bench.engine.server import EngineStartError, bench_spec, kv_block_bytes, remove_abandoned_shadows
from coda_bench.engine.session_case import expected_s
from coda_bench.engine.session_rows import engine_bases, fleet_bases, session_rows
from coda_bench.engine.session_runs import (
    Counters,
    SessionRun,
    finite_trace,
    trace_of,
    uncompressed_sessions_per_s,
)
from coda_bench.engine.systems import systems
from coda_bench.engine.window import DrainedFigures
from coda_bench.report import Row

CASE = SessionsCase("m3", warm_s=1.0, window_s=4.0, blocks=2, seeds=(1, 2))


def run(tokens: int, first_s: float, reordered: int = 0) -> SessionRun:
    token_s = tuple(first_s + 0.1 * number for number in range(tokens))
    record = RequestRecord(0, 0, 64, 64, tokens, sent_s=1.0, token_s=token_s, cached_tokens=32)
    return SessionRun((record,), Counters(admissions=10 if reordered else 0, reordered=reordered), None)


def test_figures_are_ratios_of_sums_over_the_seeds():
    runs = {"stock": [run(4, 2.0), run(2, 2.0)], "coda": [run(8, 1.5, 3), run(10, 1.5, 5)]}
    rows = {(row.metric, row.system, row.ratio_to): row for row in session_rows(CASE, runs)}
    output = rows["output_tps", "coda", "stock"]
    assert output.value == pytest.approx((8 + 10) / 8)
    assert output.ratio == pytest.approx(18 / 6)
    assert output.reps == 2
    assert rows["output_tps", "stock", None].value == pytest.approx(6 / 8)
    assert rows["max_wait", "coda", "stock"].ratio == pytest.approx(0.5)
    assert rows["reuse", "coda", None].value == 0.5
    assert rows["reordered_share", "coda", None].value == pytest.approx(8 / 20)
    assert ("reordered", "stock", None) not in rows
    shown = {row.metric for row in rows.values()}
    assert {"slo_tps", "slo1s_tps", "slo2s_tps", "slo8s_tps", "useful_tps", "completed_rps"} <= shown
    assert {"deferred_prefill", "unserved_at_end", "ttft_p50", "ttft_p95", "tbt_p95", "e2e_p50", "e2e_p95"} <= shown


def test_a_drained_trace_is_weighed_by_its_requests():
    drained = [DrainedFigures(10, 0.5, 20.0, 6.0, 0), DrainedFigures(30, 0.9, 30.0, 9.0, 1)]
    runs = {"coda": [SessionRun(run(4, 2.0).records, Counters(), one) for one in drained]}
    rows = {row.metric: row for row in session_rows(CASE, runs)}
    assert rows["drained_slo_share"].value == pytest.approx((5 + 27) / 40)
    assert rows["drained_max_wait"].value == 9.0
    assert rows["drained_unfinished"].value == 1


def test_a_run_survives_its_document():
    before = SessionRun(run(4, 2.0).records, Counters(4, 2, 0, 77), DrainedFigures(10, 0.5, 20.0, 6.0, 0))
    assert SessionRun.from_document(json.loads(json.dumps(before.to_document()))) == before


def test_every_system_is_compared_with_stock_and_with_the_rivals_before_it():
    assert engine_bases("stock") == ()
    assert engine_bases("fifo") == ("stock",)
    assert engine_bases("coda") == engine_bases("tiered-aging") == ("stock", "fifo", "cachewise")
    assert engine_bases("coda+tauMs=20000")[-1] == "coda"
    assert fleet_bases("coda/coda") == [
        "round-robin/fifo",
        "coda/fifo",
        "round-robin/coda",
        "smetric/coda",
        "smetric/fifo",
    ]
    assert "round-robin/fifo" not in fleet_bases("round-robin/fifo")


def test_published_figures_stand_beside_the_same_comparison_only():
    rows = [
        Row("engine", "m3", "output_tps", "coda", 100.0, "tokens/s", "fifo", 1.2, 1.1, 1.3),
        Row("engine", "m3", "output_tps", "coda", 100.0, "tokens/s", "stock", 2.0, 1.9, 2.1),
        Row("engine", "idle", "output_tps", "coda", 100.0, "tokens/s", "fifo", 1.0, 0.9, 1.1),
    ]
    (line,) = beside(rows)
    assert line == "m3 output_tps: coda / fifo here 1.200 (1.10-1.30); paper 1.125-1.352 [Fig. 15, one A100, M1-M3]"
    assert {case for claim in CLAIMS for case in claim.cases} <= {"fleet2", *(case.name for case in FULL)}


def test_a_trace_is_the_same_sessions_at_every_rate_and_the_finite_one_is_another():
    slow, fast = trace_of(1, 0.2, 100.0), trace_of(1, 0.4, 100.0)
    assert fast.sessions[: len(slow.sessions)] == slow.sessions
    assert len(fast.sessions) > len(slow.sessions)
    finite = finite_trace(12.5, 1, 0.4)
    assert len(finite.sessions) == 5
    assert finite.sessions[0].rounds != fast.sessions[0].rounds
    assert 0.05 < uncompressed_sessions_per_s(0.6) < 0.1


def test_full_sizes_take_no_longer_than_promised():
    minutes = {case.name: (expected_s(case, systems(",".join(case.systems)), (0, 1)) + 200) / 60 for case in FULL}
    default = minutes["m3"] + (idle.FULL.expected_s() + restore.FULL.expected_s()) / 60
    assert default <= 100
    assert all(taken <= 45 for name, taken in minutes.items() if name != "m3")
    assert fleet_expected_s(FleetCase()) / 60 <= 45
    assert restart.FULL.expected_s() / 60 <= 45
    assert selection.FULL.expected_s() / 60 <= 45


def test_a_placement_that_the_router_does_not_have_is_left_out():
    known, missing = known_placements(FleetCase(placements=("coda", "no-such-policy")))
    assert (known, missing) == (["coda"], ["no-such-policy"])


def test_the_kv_cache_is_sized_in_blocks_of_the_model(tmp_path):
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_block_bytes(tmp_path) == 2 * 30 * 3 * 64 * 4 * 32
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineStartError, match=r"config\.json"):
        kv_block_bytes(tmp_path)


def test_a_system_is_a_settings_document_that_this_version_knows(tmp_path):
    for chosen in systems("fifo,cachewise,tiered-aging,coda"):
        spec = bench_spec(tmp_path, kv_cache="1M", max_running=16, admission=chosen.admission())
        assert spec.settings().admission.state.policy.value == chosen.name


def test_copies_from_the_shadow_are_read_from_the_engines_metrics():
    text = """# TYPE vllm:kv_offload_load_bytes counter
vllm:kv_offload_load_bytes_total{engine="0"} 1000.0
vllm:kv_offload_load_bytes_total{engine="1"} 500.0
# TYPE vllm:kv_offload_load_time counter
vllm:kv_offload_load_time_total{engine="0"} 0.25
"""
    assert restore.copied_by_loads(text) == (1500.0, 0.25)
    assert restore.copied_by_loads("") == (0.0, 0.0)


def test_shared_memory_of_killed_benchmarks_is_given_back(tmp_path):
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    for owner in (ended, os.getpid()):
        (tmp_path / f"coda-bench-shadow-{owner}-abc").mkdir()
    (tmp_path / "coda-bench-shadow-notes").mkdir()
    (tmp_path / "somebody-elses").mkdir()
    remove_abandoned_shadows(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"coda-bench-shadow-{os.getpid()}-abc", "coda-bench-shadow-notes", "somebody-elses"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--case", "m9"], "there are: m3, m3-tight"),
        (["--case", "m3", "--systems", "sglang"], "there are: stock, fifo"),
        (["--cores", "a,b"], "not a list of CPU numbers"),
        (["--cores", "0,4096"], "no CPU 4096"),
        (["--capacity", "0"], "--capacity"),
    ],
)
def test_impossible_options_are_named_before_anything_starts(options: list[str], expected: str):
    result = CliRunner().invoke(command.engine, options)
    assert result.exit_code == 2
    assert expected in result.stderr
