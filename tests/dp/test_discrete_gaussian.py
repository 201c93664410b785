"""Draws of the discrete Gaussian: against its probabilities, and each decision against more digits."""

from __future__ import annotations

import math
from decimal import Context, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marfl.dp.discrete_gaussian import LARGEST_VARIANCE, Staircase, discrete_gaussian
from marfl.dp.noise import derived_words, system_words

VARIANCES = (1, 2, 3, 37, 1000, 10**6, 46_900**2, LARGEST_VARIANCE)
EXACT = Context(prec=80)


def words(seed):
    return derived_words(np.random.default_rng(seed))


def ending_with(*tail):
    """Words that come as given."""
    left = list(tail)

    def take(count):
        taken = np.array(left[:count], dtype=np.uint64)
        del left[:count]
        return taken

    return take


def probabilities(variance, largest):
    weights = np.exp(-(np.arange(-largest, largest + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


@pytest.mark.parametrize("variance", VARIANCES)
def test_the_moments_are_those_of_the_distribution(variance):
    drawn = discrete_gaussian(200_000, variance, words(variance)) / math.sqrt(variance)
    spread = sum(x * x * p for x, p in zip(range(-40, 41), probabilities(1, 40), strict=True)) if variance == 1 else 1
    assert drawn.mean() == pytest.approx(0, abs=4 / math.sqrt(len(drawn)))
    assert drawn.var() == pytest.approx(spread, rel=4 * math.sqrt(2 / len(drawn)))
    assert stats.skew(drawn) == pytest.approx(0, abs=4 * math.sqrt(6 / len(drawn)))
    assert stats.kurtosis(drawn) == pytest.approx(0, abs=5 * math.sqrt(24 / len(drawn)) + (variance == 1) * 0.01)


@pytest.mark.parametrize("variance", [1, 2, 5, 37, 300])
@pytest.mark.parametrize("bits", [(16, 32), (4, 6)])  # with few bits the exact way is taken all the time
def test_every_integer_comes_as_often_as_its_probability(variance, bits):
    staircase, count = Staircase(variance, *bits), 20_000 if bits == (4, 6) else 200_000
    drawn = staircase.draw(count, words(variance))
    largest = math.ceil(3 * math.sqrt(variance))
    expected = probabilities(variance, 40 * largest)
    middle = len(expected) // 2
    inside = expected[middle - largest : middle + largest + 1]
    counted = [int((drawn == x).sum()) for x in range(-largest, largest + 1)]
    rest = len(drawn) - sum(counted), 1 - inside.sum()
    found = stats.chisquare([*counted, rest[0]], len(drawn) * np.array([*inside, rest[1]]))
    assert found.pvalue > 1e-3


@pytest.mark.parametrize("variance", [10**6, 46_900**2])
def test_a_wide_one_is_the_normal_distribution_and_its_low_bits_are_even(variance):
    drawn = discrete_gaussian(200_000, variance, words(3))
    assert stats.kstest((drawn + 0.0) / math.sqrt(variance), "norm").pvalue > 1e-3
    assert stats.chisquare(np.bincount(drawn & 63, minlength=64)).pvalue > 1e-3


@pytest.mark.parametrize("variance", [1, 9, 1000, 46_900**2])
def test_band_times_chance_is_in_proportion_to_the_probability(variance):
    staircase = Staircase(variance)
    ends = [Decimal(0), *staircase.boundaries(70)]
    width = 1 << staircase.shift
    whole = EXACT.subtract(ends[1], ends[0])  # of the first band, where x = 0
    for x in {0, 1, width, width + width // 3, 2 * width + 1, 5 * width + width - 1}:
        band, place = divmod(x, width)
        chance = EXACT.exp(EXACT.divide(-place * (place + 2 * band * width), 2 * variance))
        share = EXACT.divide(EXACT.multiply(EXACT.subtract(ends[band + 1], ends[band]), chance), whole)
        assert float(share) == pytest.approx(float(EXACT.exp(EXACT.divide(-x * x, 2 * variance))), rel=1e-30)


@given(st.sampled_from(VARIANCES), st.integers(0, 2**16 - 1), st.integers(0, 2**32))
def test_the_table_decides_as_more_digits_do(variance, first, seed):
    staircase = Staircase(variance)
    word = np.array([first], dtype=f"u{staircase.bits // 8}")
    more = np.random.default_rng(seed).integers(0, 2**64 - 1, dtype=np.uint64, endpoint=True)
    band = int(staircase._begins(word, ending_with(more, 0))[0]) >> staircase.shift
    longer = first << 48 | int(more) >> 16
    assert band == staircase.band_exactly(longer, 64, ending_with(*[0] * 9))


@given(st.sampled_from(VARIANCES), st.floats(0, 1), st.integers(-2, 2))
def test_a_float_decides_as_more_digits_do_also_where_it_is_close(variance, part, beside):
    staircase = Staircase(variance)
    distance = int(part * 2 * variance)
    limit = int(EXACT.multiply(EXACT.exp(EXACT.divide(-distance, 2 * variance)), 2**32))
    first = min(max(limit + beside, 0), 2**32 - 1)
    kept = staircase._kept(np.array([distance]), np.array([1]), ending_with(first, 2**63, 2**63))
    assert bool(kept[0]) == staircase.kept_exactly(distance, first, 32, ending_with(2**63, 2**63))


def test_a_number_between_two_bands_is_decided_by_the_bits_that_follow():
    staircase = Staircase(1000)
    end = staircase.boundaries(200)[3]
    first = int(Context(prec=250).multiply(end, 2**64))
    next_bits = int(Context(prec=250).multiply(end, 2**128)) - (first << 64)
    assert staircase.band_exactly(first, 64, ending_with(next_bits - 2**20)) == 3
    assert staircase.band_exactly(first, 64, ending_with(next_bits + 2**20)) == 4


def test_a_number_at_the_edge_of_a_band_is_not_taken_from_the_table():
    staircase = Staircase(1000)
    edge = int(Context(prec=100).multiply(staircase.boundaries(90)[3], 2**64))
    word, rest = np.array([edge >> 48], dtype=np.uint32), (edge << 16) % 2**64
    bands = [
        int(staircase._begins(word, ending_with(rest, after, 0))[0]) >> staircase.shift for after in (0, 2**64 - 1)
    ]
    assert bands == [3, 4]


def test_the_rarest_words_give_far_bands_and_no_endless_loop():
    staircase = Staircase(46_900**2)
    far = staircase.band_exactly(2**64 - 1, 64, ending_with(2**64 - 2**50, 0, 0, 0))
    assert far > len(staircase._table)


def test_the_same_words_give_the_same_draws():
    assert np.array_equal(discrete_gaussian(1000, 77, words(1)), discrete_gaussian(1000, 77, words(1)))
    assert not np.array_equal(discrete_gaussian(1000, 77, words(1)), discrete_gaussian(1000, 77, words(2)))


def test_words_from_the_os_are_uniform_and_never_the_same():
    drawn = system_words()(50_000)
    assert stats.kstest(drawn / 2.0**64, "uniform").pvalue > 1e-4
    assert len(np.unique(np.concatenate([drawn, system_words()(50_000)]))) == 100_000


def test_one_stream_of_words_goes_on_and_does_not_repeat():
    stream = system_words()
    assert not np.array_equal(stream(100), stream(100))


@pytest.mark.parametrize("variance", [0, -1, LARGEST_VARIANCE + 1])
def test_a_variance_that_cannot_be_drawn_is_refused(variance):
    with pytest.raises(ValueError, match="a variance of"):
        discrete_gaussian(1, variance, words(1))
