"""A p99 over the last minute, and an alarm on it."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterable

SLICES = 6
SLICE_SECONDS = 10.0
BOUNDS = tuple(0.001 * 1.1**power for power in range(120))
"""Upper bounds of the sketch's buckets in seconds, 1 ms to 85 s: a quantile is right to 10 %."""


class LatencySketch:
    """Counts latencies in exponential buckets, in slices of time that are dropped as they grow old."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: list[tuple[float, list[int]]] = []

    def observe(self, seconds: Iterable[float]) -> None:
        now = self._clock()
        if not self._slices or now - self._slices[-1][0] >= SLICE_SECONDS:
            self._slices.append((now, [0] * (len(BOUNDS) + 1)))
            self._slices = [(start, row) for start, row in self._slices if now - start < SLICES * SLICE_SECONDS]
        row = self._slices[-1][1]
        for value in seconds:
            row[bisect.bisect_left(BOUNDS, value)] += 1

    def quantile(self, share: float) -> tuple[float, int]:
        """(latency in seconds that `share` of the samples do not exceed, number of samples); nan without samples."""
        now = self._clock()
        rows = [row for start, row in self._slices if now - start < SLICES * SLICE_SECONDS]
        counts = [sum(column) for column in zip(*rows, strict=True)]
        total = sum(counts)
        if not total:
            return math.nan, 0
        reached, rank = 0, math.ceil(share * total)
        for index, count in enumerate(counts):
            reached += count
            if reached >= rank:
                return BOUNDS[min(index, len(BOUNDS) - 1)], total
        raise AssertionError("unreachable: the counts sum to the total")


class Alarm:
    """Rises when the p99 passes the level, and falls only well below it or without samples: it does not flutter."""

    MIN_SAMPLES = 100
    FALLS_AT = 0.9  # of the level

    def __init__(self, level: float) -> None:
        self.level = level  # seconds
        self.on = False
        self.raised = 0

    def update(self, p99: float, samples: int) -> bool:
        """Take a reading. True when the alarm rose with it."""
        if self.on:
            self.on = p99 >= self.level * self.FALLS_AT  # nan, for no samples, is not
            return False
        self.on = samples >= self.MIN_SAMPLES and p99 > self.level
        self.raised += self.on
        return self.on
