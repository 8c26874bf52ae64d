"""Whether somebody else was using the machine while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

TICK = 1 / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """CPU time that all cores together have spent on anything, and that a hypervisor took away, since the start."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK


def group_seconds(groups: Collection[int]) -> float:
    """CPU time of the living processes of these process groups."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) in groups:
            ticks += int(fields[11]) + int(fields[12])
    return ticks * TICK


@attrs.define
class Watch:
    """`others`: the cores that everybody else kept busy on average; known when the `with` has ended."""

    others: float = 0.0


@contextmanager
def watching(groups: Collection[int]) -> Iterator[Watch]:
    """Watch the machine while the processes of `groups`, and this one, do their work."""
    watch = Watch()
    wall, busy, own = time.monotonic(), busy_seconds(), group_seconds(groups) + time.process_time()
    yield watch
    own = group_seconds(groups) + time.process_time() - own
    watch.others = max(0.0, busy_seconds() - busy - own) / (time.monotonic() - wall)
