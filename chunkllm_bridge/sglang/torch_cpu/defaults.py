"""The launch parameters that a machine with no GPU wants where the user has said nothing."""

from __future__ import annotations

import os
from typing import Any

from . import refusals

MEMORY = 0.8  # of what is free: the KV cache is committed page by page, as it is used
# An OpenMP thread that waits for its fellow sleeps at once: the HTTP server and the detokenizer share the cores, and a
# fellow that has lost its core to a spinning thread comes late.
SPINS = 20000


def apply(server_args: Any) -> None:
    """Check `server_args`, then fill them in, in place; the processes to be started inherit the environment."""
    refusals.check(server_args)
    server_args.device = "cpu"
    server_args.attention_backend = "torch_native"
    server_args.sampling_backend = "pytorch"
    server_args.sleep_on_idle = True  # else the idle loop polls, and takes a core from whoever works
    if server_args.mem_fraction_static is None:
        server_args.mem_fraction_static = MEMORY
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    bind_ranks(server_args.tp_size * server_args.dp_size * server_args.pp_size)


def bind_ranks(ranks: int) -> None:
    """Give each rank an equal share of the cores of this process, unless the user has said which."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1 or ranks > len(cores) or os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    share = len(cores) // ranks
    parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)


def hold_cores() -> None:
    """In a worker of several: run on the cores of this rank, with as many threads.

    SGLang leaves that to its own CPU kernels, which are not here.
    """
    import torch
    from sglang.srt.runtime_context import get_device

    binding = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "all")
    if "|" not in binding:
        return
    cores = _cores(binding.split("|")[get_device().gpu_id])
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def _cores(text: str) -> set[int]:
    """ "0-2,5" -> {0, 1, 2, 5}"""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
