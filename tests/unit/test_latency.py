"""The p99 and its alarm, against clocks that are told the time and percentiles that are counted."""

from __future__ import annotations

import math
import random

import pytest

from chunkllm_bridge.common.latency import BOUNDS, SLICE_SECONDS, SLICES, Alarm, LatencySketch
from chunkllm_bridge.common.testing import Clock


def test_quantiles_are_right_to_ten_percent() -> None:
    """And never below the exact one."""
    sketch, numbers = LatencySketch(Clock()), random.Random(0)
    values = sorted(numbers.lognormvariate(-4, 1) for _ in range(5_000))
    sketch.observe(values)

    for share in (0.5, 0.9, 0.99, 1.0):
        exact = values[math.ceil(share * len(values)) - 1]
        found, number = sketch.quantile(share)
        assert len(values) == number
        assert exact <= found <= max(exact * 1.1001, BOUNDS[0])


def test_no_samples_no_number() -> None:
    """Not zero: nothing was fast."""
    latency, number = LatencySketch(Clock()).quantile(0.99)

    assert math.isnan(latency)
    assert 0 == number


def test_a_minute_later_it_is_forgotten() -> None:
    """Also when nothing came since."""
    clock = Clock()
    sketch = LatencySketch(clock)
    sketch.observe([5.0])
    clock.advance(SLICES * SLICE_SECONDS - 1)
    sketch.observe([0.01])

    assert 2 == sketch.quantile(0.5)[1]
    clock.advance(1)
    assert 1 == sketch.quantile(0.5)[1]
    clock.advance(SLICES * SLICE_SECONDS)
    assert 0 == sketch.quantile(0.5)[1]


@pytest.mark.parametrize(("value", "found"), [(0.0, BOUNDS[0]), (1e9, BOUNDS[-1])])
def test_values_out_of_range_go_to_the_ends(value: float, found: float) -> None:
    sketch = LatencySketch(Clock())
    sketch.observe([value])

    assert (found, 1) == sketch.quantile(0.99)


def test_the_alarm_rises_once_and_falls_well_below() -> None:
    """It does not flutter around its level."""
    alarm = Alarm(0.120)
    readings = [0.119, 0.121, 0.119, 0.125, 0.109, 0.107, 0.115, 0.130]

    rose = [alarm.update(p99, 1_000) for p99 in readings]

    assert [False, True, False, False, False, False, False, True] == rose
    assert 2 == alarm.raised


def test_few_samples_raise_no_alarm() -> None:
    """The p99 of a handful is its slowest."""
    alarm = Alarm(0.120)

    assert not alarm.update(9.0, Alarm.MIN_SAMPLES - 1)
    assert alarm.update(9.0, Alarm.MIN_SAMPLES)


def test_an_idle_server_is_not_slow() -> None:
    """Without samples there is no p99 above the level, so the alarm falls."""
    alarm = Alarm(0.120)
    alarm.update(9.0, 1_000)

    alarm.update(math.nan, 0)

    assert not alarm.on
