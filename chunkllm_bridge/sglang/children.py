"""The processes of an engine, while it is launched."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator

from chunkllm_bridge.common.launching import ACTIVE


@contextlib.contextmanager
def attaching() -> Iterator[None]:
    """The processes that are spawned meanwhile learn from their environment that they have to attach."""
    before = os.environ.get(ACTIVE)
    os.environ[ACTIVE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ACTIVE]
        else:
            os.environ[ACTIVE] = before


@contextlib.contextmanager
def ending() -> Iterator[contextlib.ExitStack]:
    """Ends every child that was started in the block, unless what it gives is emptied."""
    from sglang.srt.utils import kill_process_tree

    before = set(multiprocessing.active_children())

    def end() -> None:
        for child in set(multiprocessing.active_children()) - before:
            kill_process_tree(child.pid)

    with contextlib.ExitStack() as stop:
        stop.callback(end)
        yield stop
