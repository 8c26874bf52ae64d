"""Two things measured in turn, and what may be said of their ratio.

Runs come in pairs, close in time, and the order alternates, so that a machine that slowly changes speed hurts both
sides alike. The ratio of each pair is one observation; their median is the answer, with a bootstrap interval.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Pair:
    """One run of each side; rates, so that a ratio above one is in the candidate's favour."""

    baseline: float
    candidate: float
    baseline_first: bool

    @property
    def ratio(self) -> float:
        return self.candidate / self.baseline


@attrs.frozen(kw_only=True)
class Summary:
    """The median, the quartiles, and the interval that holds the median with 95 % confidence."""

    n: int
    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, draws: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap of the median: the same numbers for the same values."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    tail = int((1 - level) / 2 * draws)
    return medians[tail], medians[-1 - tail]


def summarize(values: Sequence[float]) -> Summary:
    if len(values) < 2:
        raise ValueError(f"{len(values)} value(s) have no spread: take at least two")
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    low, high = bootstrap_interval(values)
    return Summary(n=len(values), median=median, lower_quartile=lower, upper_quartile=upper, low=low, high=high)


def provenance(*distributions: str) -> dict[str, Any]:
    """Where a result comes from: the commit, the versions, the machine, the day."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "git_sha": git("rev-parse", "HEAD") or "none",
        "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in distributions},
        "cpu": cpu,
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
