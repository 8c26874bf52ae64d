"""What speculation of any algorithm asks of a KV pool, in torch's operations where SGLang has only a GPU's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def assign(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new slots, one request's after the other's, into the requests' rows from `start` to `end` (requests,)."""
    import torch

    counts = end_offset - start_offset
    row = torch.repeat_interleave(req_pool_indices, counts)
    before = counts.cumsum(0) - counts  # slots of the requests that stand before
    column = torch.arange(len(row)) + torch.repeat_interleave(start_offset - before, counts)
    req_to_token[row, column] = out_cache_loc.to(req_to_token.dtype)


def replace_kernels() -> None:
    """In a worker: SGLang's allocation calls `assign` for every speculative algorithm. Idempotent."""
    from sglang.srt.mem_cache import allocation

    allocation.assign_req_to_token_pool_func = assign


@functools.cache
def pool_class() -> Any:
    """SGLang's own KV pool, which warms up a GPU's kernel for moving slots as soon as anything speculates."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class TorchKVPool(MHATokenToKVPool):  # type: ignore[misc]
        def _init_kv_copy_and_warmup(self) -> None:
            self._kv_copy_config = None
            self.use_native_move_kv_cache = True

    return TorchKVPool
