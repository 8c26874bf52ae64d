"""Between the worker and the DRAFTS seam: who drafts what for the next step, and how it fared.

With tensor parallelism every rank verifies by itself, so all verify the drafts of the first: a plugin may be late or
fail on one rank alone. Nothing of it may reach the step: whatever fails here costs this step's drafts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from sglang.srt.utils.common import async_d2h

from chunkllm_bridge.common.drafts import Drafting
from chunkllm_bridge.common.fitting import Drafts
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.sglang.sampling import has_single, must_go_singly

log = get_logger("sglang.drafts")


def leave_room(scheduler: Any) -> None:
    """Let no request grow so long that the slots which two steps reserve beyond its end are more than the pool has:
    SGLang would end it with an error."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    room = int(scheduler.max_total_num_tokens) - get_alloc_reserve_per_decode() - int(scheduler.page_size)
    if (excess := scheduler.max_req_len - room) > 0:
        scheduler.max_req_len -= excess
        scheduler.max_req_input_len -= excess


@attrs.frozen
class Step:
    """A decode whose result is not read yet."""

    requests: Sequence[Any]
    drafted: torch.Tensor | None  # (requests,) int64 on the host, complete when the step's result is
    seconds: float  # since the decode before; 0.0: not comparable


class DraftsBridge:
    """`group` is SGLang's `GroupCoordinator` of the ranks that verify the same."""

    def __init__(self, drafting: Drafting, group: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafting, self._group, self._clock = drafting, group, clock
        self._leads = group.rank_in_group == 0
        self._steps: deque[Step] = deque()
        self._last: tuple[list[str], float] | None = None  # the decode before: its requests, and when it was done
        self._complained = False

    def interrupt(self) -> None:
        """Something came between two decodes: the time from one to the next says nothing."""
        self._last = None

    def propose(self, batch: Any, most: int) -> Drafts | None:
        """Drafts for a batch that is to be decoded, at most so many per request; None: it decodes plainly."""
        if self.drafting.host.spec["speculative.plugin"] is None:  # as on every rank
            return None
        single: list[int] = []
        if has_single(batch.sampling_info):
            single = [index for index, request in enumerate(batch.reqs) if must_go_singly(request)]
            if len(single) == len(batch.reqs):
                return None
        drafts = self._ask(batch, most) if self._leads else None
        if self._group.world_size > 1:
            drafts = self._agreed(drafts, batch.spec_info.bonus_tokens, most)
        if drafts is not None and single:
            drafts.tokens[single] = -1
        return drafts

    def _ask(self, batch: Any, most: int) -> Drafts | None:
        try:
            carried = batch.spec_info
            ids = [request.rid for request in batch.reqs]
            drafts = self.drafting.propose(ids, carried.hidden_states, carried.bonus_tokens)
        except Exception as error:  # a request must not pay for our mistake either
            self._complain(error)
            return None
        return drafts if drafts is not None and 0 < drafts.tokens.shape[1] <= most else None

    def _agreed(self, drafts: Drafts | None, newest: torch.Tensor, most: int) -> Drafts | None:
        """The first rank's drafts, on every rank: their width and tree by the host, their tokens by the device.

        `newest` (requests,) tells where and how many.
        """
        import torch.distributed as dist

        first, carrier = self._group.ranks[0], self._group.cpu_group
        told = torch.zeros(2 + most, dtype=torch.int64)  # width, whether it is a tree, the parents
        if drafts is not None:
            width = drafts.tokens.shape[1]
            told[0] = width
            if drafts.parents is not None:
                told[1], told[2 : 2 + width] = 1, torch.tensor(drafts.parents)
        dist.broadcast(told, src=first, group=carrier)
        width, tree, *parents = told.tolist()
        if not width:
            return None
        if drafts is None:
            drafts = Drafts(
                torch.empty(len(newest), width, dtype=torch.int64, device=newest.device),
                tuple(parents[:width]) if tree else None,
            )
        tokens = drafts.tokens.contiguous()
        self._group.broadcast(tokens, src=0)
        return Drafts(tokens, drafts.parents)

    def verifying(self, batch: Any, drafts: Drafts | None) -> None:
        """A decode was made; its result is read later."""
        try:
            ids = [request.rid for request in batch.reqs]
            now, last = self._clock(), self._last
            same = last is not None and last[0] == ids and not batch.after_idle_gap
            seconds = now - last[1] if same and last is not None else 0.0
            self._last = (ids, now)
            drafted = None if drafts is None else async_d2h((drafts.tokens >= 0).sum(1))
            self._steps.append(Step(batch.reqs, drafted, seconds))
        except Exception as error:
            self._complain(error)

    def verified(self, accepted: Sequence[int]) -> None:
        """The result of the oldest open decode is read: accepted drafts of each of its requests."""
        try:
            step = self._steps.popleft()
            if len(step.requests) != len(accepted):
                raise RuntimeError(f"a result of {len(accepted)} requests for a step of {len(step.requests)}")
            drafted = [0] * len(accepted) if step.drafted is None else step.drafted.tolist()
            ids, tried, right = [], [], []
            for request, drafts, count in zip(step.requests, drafted, accepted, strict=True):
                if request.finished() or request.is_retracted:
                    continue  # it was in flight when its last result was read: nothing comes of this step
                room = request.sampling_params.max_new_tokens - len(request.output_ids) - 1
                ids.append(request.rid)
                tried.append(min(drafts, max(0, room)))
                right.append(min(count, max(0, room)))
            if ids:
                self.drafting.verified(ids, tried, right, step.seconds)
        except Exception as error:
            self._steps.clear()
            self._complain(error)

    def finished(self, request_id: str) -> None:
        try:
            self.drafting.finished(request_id)
        except Exception as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        self._last = None
        if not self._complained:
            self._complained = True
            log.error("drafts.failed", reason=str(error), exc_info=error)
