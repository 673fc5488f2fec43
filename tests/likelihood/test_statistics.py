"""One standard error for every figure per token."""

import math
import statistics

import pytest
import torch

from dcdm.likelihood.statistics import known, mean_and_stderr, with_stderr


def test_rows_of_equal_length_have_the_textbook_standard_error():
    values = [3.0, 5.0, 4.0, 8.0]
    mean, stderr = mean_and_stderr((10 * value, 10) for value in values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert stderr == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))


def test_rows_that_differ_in_length_alone_have_no_error():
    assert mean_and_stderr([(2.0, 1), (8.0, 4), (6.0, 3)]) == (2.0, 0.0)


def test_a_single_row_says_nothing_about_the_error():
    mean, stderr = mean_and_stderr([(6.0, 3)])
    assert mean == 2.0
    assert known(stderr) is None
    assert known(0.5) == 0.5
    assert with_stderr(mean, stderr, 2) == "2.00"
    assert with_stderr(mean, 0.5, 2) == "2.00 ± 0.50"


def test_the_error_is_as_large_as_the_spread_of_the_figure_over_samples_of_rows():
    generator = torch.Generator().manual_seed(0)
    figures, errors = [], []
    for _ in range(2000):
        sizes = torch.randint(5, 30, (40,), generator=generator)
        nats = sizes * (2 + 0.5 * torch.randn(40, generator=generator))
        mean, stderr = mean_and_stderr(zip(nats.tolist(), sizes.tolist(), strict=True))
        figures.append(mean)
        errors.append(stderr)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(figures), rel=0.05)
