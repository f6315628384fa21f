"""The arithmetic of windows, by an example that was computed by hand."""

import pytest

from coda_bench.engine.intervals import percentile, ratio_of_statistics, ratio_of_sums
from coda_bench.engine.records import RequestRecord
from coda_bench.engine.slo import Slo, mean_tbt_s
from coda_bench.engine.window import Window, drained_figures, figures_of

WINDOW = Window(start_s=10.0, end_s=20.0, blocks=2)

DONE_BEFORE = RequestRecord(0, 0, 100, 100, 2, sent_s=1.0, token_s=(2.0, 3.0), cached_tokens=0)
ACROSS_THE_START = RequestRecord(0, 1, 150, 48, 4, sent_s=8.0, token_s=(9.0, 9.5, 10.5, 11.0), cached_tokens=96)
INSIDE = RequestRecord(1, 0, 200, 200, 3, sent_s=11.0, token_s=(12.0, 12.1, 12.2), cached_tokens=64)
TOO_LATE_A_FIRST_TOKEN = RequestRecord(2, 0, 80, 80, 2, sent_s=11.5, token_s=(16.0, 16.1), cached_tokens=0)
ACROSS_THE_END = RequestRecord(3, 0, 60, 60, 3, sent_s=17.0, token_s=(18.0, 19.0, 21.0), cached_tokens=0)
UNSERVED = RequestRecord(4, 0, 300, 300, 5, sent_s=13.0, token_s=(25.0, 25.1, 25.2, 25.3, 25.4), cached_tokens=0)
SENT_AFTER = RequestRecord(5, 0, 10, 10, 1, sent_s=20.5, token_s=(20.6,), cached_tokens=0)
ALL = (DONE_BEFORE, ACROSS_THE_START, INSIDE, TOO_LATE_A_FIRST_TOKEN, ACROSS_THE_END, UNSERVED, SENT_AFTER)


def test_output_is_counted_in_the_block_in_which_it_arrives():
    figures = figures_of(ALL, WINDOW)
    # Block 1: 10.5 and 11.0, 12.0 to 12.2; block 2: 16.0 and 16.1, 18.0 and 19.0 (21.0 is after the end).
    assert figures.output_tokens == (5, 4)


def test_output_counts_for_an_slo_by_what_was_known_at_the_windows_end():
    figures = figures_of(ALL, WINDOW)
    # Kept by `INSIDE` alone: the one across the start has 2.0 s / 3 between tokens, the one across the end 1.0 s.
    assert figures.slo_tokens[4.0] == (3, 0)
    # With 8 s to the first token `TOO_LATE_A_FIRST_TOKEN` (4.5 s) counts too.
    assert figures.slo_tokens[8.0] == (3, 2)
    assert figures.slo_tokens[1.0] == (3, 0)


def test_useful_tokens_are_new_text_and_in_window_output_of_what_was_completed():
    figures = figures_of(ALL, WINDOW)
    # Across the start: 48 + 2 in the window; inside: 200 + 3; too late: 80 + 2 in block 2.
    assert figures.useful_tokens == (48 + 2 + 200 + 3, 80 + 2)
    assert figures.completed == (2, 1)


def test_latencies_are_those_of_requests_that_were_served_in_the_window():
    figures = figures_of(ALL, WINDOW)
    assert figures.ttft_s == pytest.approx((1.0, 4.5, 1.0))
    assert figures.e2e_s == pytest.approx((3.0, 1.2, 4.6))
    assert sorted(figures.tbt_s) == pytest.approx([0.1, 0.1, 0.1, 0.5, 1.0, 1.0])


def test_the_longest_wait_includes_requests_that_were_never_served():
    figures = figures_of(ALL, WINDOW)
    assert figures.longest_wait_s == pytest.approx(7.0)
    assert figures.unserved == 1
    assert figures.deferred_prefill_tokens == 300


def test_reuse_is_taken_from_completed_requests():
    figures = figures_of(ALL, WINDOW)
    assert figures.prompt_tokens == 150 + 200 + 80
    assert figures.cached_tokens == 96 + 64


def test_an_empty_window_is_all_zeros():
    figures = figures_of((), WINDOW)
    assert figures.output_tokens == (0, 0)
    assert figures.longest_wait_s == 0


def test_a_drained_trace_counts_what_never_came_as_missed():
    records = [
        INSIDE,
        TOO_LATE_A_FIRST_TOKEN,
        RequestRecord(6, 0, 9, 9, 4, sent_s=12.0, token_s=(), cached_tokens=None),
    ]
    figures = drained_figures(records, requests=4, ended_s=40.0)
    assert figures.slo_share == 0.25
    assert figures.unfinished == 2
    assert figures.longest_wait_s == 28.0
    assert figures.output_tps == pytest.approx(5 / 5.1)


def test_an_slo_needs_both_a_first_token_and_a_pace():
    slo = Slo(ttft_s=1.0, mean_tbt_s=0.2)
    assert slo.holds(INSIDE)
    assert not slo.holds(ACROSS_THE_END)
    assert not slo.holds(RequestRecord(0, 0, 1, 1, 1, sent_s=0.0, token_s=()))
    assert mean_tbt_s((3.0,)) == 0.0


def test_a_record_survives_its_document():
    document = INSIDE.to_document()
    assert RequestRecord.from_document(document) == INSIDE


def test_a_ratio_of_sums_weighs_busy_seeds_more():
    ratio = ratio_of_sums([[30.0, 10.0], [2.0, 2.0]], [[10.0, 10.0], [4.0, 4.0]])
    assert ratio is not None
    assert ratio.ratio == pytest.approx(44 / 28)
    assert 0.5 <= ratio.low < ratio.ratio < ratio.high <= 3.0


def test_proportional_blocks_have_an_interval_of_no_width():
    ratio = ratio_of_sums([[3.0, 6.0], [9.0, 1.5]], [[2.0, 4.0], [6.0, 1.0]])
    assert ratio is not None
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


def test_there_is_no_ratio_to_nothing():
    assert ratio_of_sums([[1.0]], [[0.0]]) is None
    assert ratio_of_statistics([[1.0]], [[]], max) is None


@pytest.mark.parametrize(("values", "base"), [([], []), ([[1.0]], [[1.0], [1.0]]), ([[1.0]], [[1.0, 2.0]])])
def test_ratios_need_the_same_seeds_and_blocks(values: list[list[float]], base: list[list[float]]):
    with pytest.raises(ValueError, match="the same seeds"):
        ratio_of_sums(values, base)


def test_a_percentile_is_linear_between_samples():
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([7.0], 0.95) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)


def test_a_ratio_of_percentiles_pools_the_seeds():
    ratio = ratio_of_statistics([[1.0, 3.0], [5.0]], [[2.0, 2.0], [2.0]], lambda samples: percentile(samples, 0.5))
    assert ratio is not None
    assert ratio.ratio == 1.5
    assert ratio.low <= 1.5 <= ratio.high


def test_many_samples_have_nearly_the_interval_of_all_of_them():
    many = [[float(number + run) for number in range(20_000)] for run in range(3)]
    base = [[2 * sample for sample in samples] for samples in many]
    ratio = ratio_of_statistics(many, base, lambda samples: percentile(samples, 0.95))
    assert ratio is not None
    assert (ratio.low, ratio.ratio, ratio.high) == pytest.approx((0.5, 0.5, 0.5), rel=1e-3)
