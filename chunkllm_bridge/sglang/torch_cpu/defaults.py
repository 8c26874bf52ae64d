"""The launch parameters that a machine with no GPU wants where the user has said nothing, and what it must refuse."""

from __future__ import annotations

import os
from typing import Any


def apply(server_args: Any) -> None:
    """Fill in `server_args` in place."""
    server_args.device = server_args.device or "cpu"
    server_args.attention_backend = server_args.attention_backend or "torch_native"
    server_args.sampling_backend = server_args.sampling_backend or "pytorch"
    server_args.sleep_on_idle = True
    bind_ranks(server_args.tp_size * server_args.dp_size * server_args.pp_size)


def bind_ranks(ranks: int) -> None:
    """Give each rank an equal share of the cores of this process, unless the user has said which."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1 or ranks > len(cores) or os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    share = len(cores) // ranks
    parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
