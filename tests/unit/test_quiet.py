"""bench/quiet.py: who used the machine while something was measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from bench.quiet import group_seconds, watching


@pytest.fixture
def spinner() -> Iterator[int]:
    """A process, in a group of its own, that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def wait_for_cpu(group: int, seconds: float) -> None:
    while group_seconds({group}) < seconds:
        time.sleep(0.01)


def test_somebody_else_is_noticed(spinner: int):
    """A process that is not ours shows as busy cores."""
    with watching({os.getpgid(0)}) as watch:
        wait_for_cpu(spinner, 0.3)

    assert 0.05 < watch.others


def test_our_own_work_is_not_somebody_else(spinner: int):
    """The same process, when it is one of ours, is taken off: what is left is less by what it used."""
    started, used = time.monotonic(), group_seconds({spinner})
    with watching(set()) as foreign, watching({spinner}) as ours:
        wait_for_cpu(spinner, used + 0.3)
    share = 0.3 / (time.monotonic() - started)

    assert ours.others < foreign.others - share / 2
