"""Between the worker and the DRAFTS seam: who drafts what for the next step, and how it fared.

With tensor parallelism every rank verifies by itself, so all verify the drafts of the first: a plugin may be late or
fail on one rank alone. Nothing of it may reach the step: whatever fails here costs this step's drafts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from sglang.srt.utils.common import async_d2h

from chunkllm_bridge.common.drafts import Asked, Drafting
from chunkllm_bridge.common.fitting import Drafts
from chunkllm_bridge.sglang.sampling import has_single, must_go_singly


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
    asked: Asked
    said: Mapping[str, list[int]]  # request -> its tokens of this step, where they can be read without waiting


class DraftsBridge:
    """`group` is SGLang's `GroupCoordinator` of the ranks that verify the same."""

    def __init__(self, drafting: Drafting, group: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.drafting, self._group, self._clock = drafting, group, clock
        self._leads = group.rank_in_group == 0
        self._steps: deque[Step] = deque()
        self._last: tuple[list[str], float] | None = None  # the decode before: its requests, and when it was done

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

            def context(place: int, first: int) -> list[int] | None:
                return self._text(batch, place, first)

            drafts = self.drafting.propose(ids, carried.hidden_states, carried.bonus_tokens, context)
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

    def _text(self, batch: Any, place: int, first: int) -> list[int] | None:
        """A request's tokens from place `first` on, with those of steps whose results are not read yet.

        None on a GPU where SGLang schedules ahead: they would have to be waited for.
        """
        request, newest = batch.reqs[place], batch.spec_info.bonus_tokens
        if batch.enable_overlap and newest.device.type != "cpu":
            return None
        prompt, output = request.origin_input_ids, request.output_ids
        ahead = [token for step in self._steps for token in step.said.get(request.rid, ())]
        missing = int(batch.seq_lens[place]) + 1 - len(prompt) - len(output) - len(ahead)
        if missing == 1:  # a prefill is not read yet
            ahead.append(int(newest[place]))
        elif missing:
            return None
        seen = first - len(prompt)
        return [*prompt[first:], *output[max(0, seen) :], *ahead[max(0, seen - len(output)) :]]

    def verifying(self, batch: Any, drafts: Drafts | None, result: Any) -> None:
        """A decode was made; its result is read later."""
        try:
            ids = [request.rid for request in batch.reqs]
            now, last = self._clock(), self._last
            same = last is not None and last[0] == ids and not batch.after_idle_gap
            seconds = now - last[1] if same and last is not None else 0.0
            self._last = (ids, now)
            drafted = None if drafts is None else async_d2h((drafts.tokens >= 0).sum(1))
            said = tokens_of(ids, result) if self._leads and batch.enable_overlap else {}
            self._steps.append(Step(batch.reqs, drafted, seconds, self.drafting.asked, said))
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
                self.drafting.verified(ids, tried, right, step.seconds, step.asked)
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
        self.drafting.failed("step", error)


def tokens_of(request_ids: Sequence[str], result: Any) -> dict[str, list[int]]:
    """Each request's tokens of a step, where the device is the host."""
    tokens, counts = result.next_token_ids, result.accept_lens
    if tokens.device.type != "cpu":
        return {}
    rows = tokens.view(len(request_ids), -1).tolist()
    return {name: row[:count] for name, row, count in zip(request_ids, rows, counts.tolist(), strict=True)}
