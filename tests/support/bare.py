"""A scheduler process of SGLang in which the bridge is not loaded, whatever the launch asked for."""

from __future__ import annotations

import os
from typing import Any


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """As SGLang's own, without the word that tells our plugin to attach."""
    from sglang.srt.managers import scheduler

    os.environ.pop("CHUNKLLM_ACTIVE", None)
    scheduler.run_scheduler_process(*args, **kwargs)
