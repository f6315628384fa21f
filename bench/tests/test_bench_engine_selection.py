import math

import pytest

from coda_bench.engine.selection import quantile


def test_a_quantile_is_linear_within_its_bucket():
    histogram = [(0.1, 0), (0.3, 100), (math.inf, 100)]
    assert quantile(histogram, 0.5) == pytest.approx(0.2)


def test_a_quantile_beyond_the_last_bound_is_that_bound():
    assert quantile([(0.1, 10), (math.inf, 100)], 0.9) == 0.1


def test_a_window_without_selections_has_no_quantile():
    with pytest.raises(ValueError, match="no selections"):
        quantile([(0.1, 0), (math.inf, 0)], 0.5)
