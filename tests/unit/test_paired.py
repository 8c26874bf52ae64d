"""bench/paired.py: the statistics that a claim about overhead rests on."""

from __future__ import annotations

import random

import pytest

from bench.paired import Pair, bootstrap_interval, provenance, summarize


def test_ratio_favours_the_candidate_above_one():
    """A candidate that is faster has a ratio above one, whichever of the two ran first."""
    assert 1.1 == pytest.approx(Pair(baseline=10.0, candidate=11.0, baseline_first=False).ratio)


def test_summary_of_known_values():
    """Median and quartiles are the textbook's."""
    summary = summarize([0.96, 0.98, 1.00, 1.02, 1.04])

    assert (5, 1.00, 0.98, 1.02) == (summary.n, summary.median, summary.lower_quartile, summary.upper_quartile)
    assert summary.low <= summary.median <= summary.high


def test_same_values_same_interval():
    """The interval is reproducible: nothing in it depends on when it was made."""
    values = [random.Random(1).gauss(1.0, 0.02) for _ in range(20)]

    assert bootstrap_interval(values) == bootstrap_interval(values)


def test_interval_holds_the_true_median_about_as_often_as_it_says():
    """Of many experiments with a known median, nearly all intervals contain it."""
    generator = random.Random(7)
    hits = 0
    for _ in range(100):
        low, high = bootstrap_interval([generator.gauss(1.0, 0.02) for _ in range(25)], draws=400)
        hits += low <= 1.0 <= high

    assert 88 <= hits


def test_interval_narrows_with_more_pairs():
    """Taking more pairs buys a narrower interval, which is what the adaptive loop relies on."""
    generator = random.Random(3)
    values = [generator.gauss(1.0, 0.02) for _ in range(160)]

    assert summarize(values).half_width < summarize(values[:10]).half_width


def test_one_value_is_no_evidence():
    """A single pair is refused instead of giving an interval of width nought."""
    with pytest.raises(ValueError, match="at least two"):
        summarize([1.0])


def test_provenance_says_what_ran_where():
    """A result can be traced to a commit, versions and a machine."""
    found = provenance("pytest")

    assert {"git_sha", "git_dirty", "versions", "cpu", "cores", "date"} == set(found)
    assert pytest.__version__ == found["versions"]["pytest"]
