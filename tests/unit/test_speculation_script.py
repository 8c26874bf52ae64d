"""scripts/speculation.py: the statistics that a claim about sampling rests on."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from scripts.speculation import p_value


def test_a_known_table():
    """Two by two, from a textbook's formula: n (ad - bc)^2 / (row and column sums)."""
    statistic, p, degrees = p_value(Counter(a=30, b=70), Counter(a=45, b=55))

    assert 1 == degrees
    assert 200 * (30 * 55 - 70 * 45) ** 2 / (100 * 100 * 75 * 125) == pytest.approx(statistic)
    assert 0.0285 == pytest.approx(p, abs=5e-4)


def test_one_distribution_is_seldom_taken_for_two():
    """p is below 0.05 about once in twenty times."""
    chance = random.Random(5)
    low = 0
    for _ in range(400):
        one, other = (Counter(chance.choices("abcdef", weights=(9, 7, 5, 3, 2, 1), k=300)) for _ in range(2))
        low += p_value(one, other)[1] < 0.05

    assert 8 <= low <= 34


def test_two_distributions_are_told_apart():
    chance = random.Random(5)
    one = Counter(chance.choices("abc", weights=(5, 3, 2), k=2000))
    other = Counter(chance.choices("abc", weights=(5, 2, 3), k=2000))

    assert p_value(one, other)[1] < 1e-6


def test_rare_texts_are_one_class():
    """So that no expected number is too small for the test to mean anything."""
    one, other = Counter({"a": 500} | {f"rare {n}": 1 for n in range(50)}), Counter({"a": 550})

    assert 1 == p_value(one, other)[2]
