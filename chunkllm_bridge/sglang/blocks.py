"""KV quotas and batch windows on SGLang's scheduler: the engine's own objects, with six functions wrapped.

Every rank of a tensor-parallel group runs its own scheduler, and all must schedule the same: so only the first asks the
plugins (their deadlines and the batch window are matters of a clock), and what it decides travels to all of them as a
`Decision` with the requests, as the engine's own timeouts do (`Scheduler._poll_timeout_aborts`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chunkllm_bridge.common.abi import BatchingStep
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.quota import Counts, pages_for
from chunkllm_bridge.common.scheduling import Scheduling
from chunkllm_bridge.patches import sglang as patches
from chunkllm_bridge.sglang.transport import Decision


class SchedulerBridge(Scheduling):
    """Asks the host once per step on the first rank, and enforces what it answers on each. Lives as long as the
    scheduler. `host` is None on the other ranks."""

    def __init__(self, scheduler: Any, host: Host | None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.scheduler, self.pool = scheduler, scheduler.token_to_kv_pool_allocator
        self.page = int(self.pool.page_size)
        super().__init__(host, int(self.pool.size) // self.page)
        self._clock = clock  # the one of `Req.time_stats`
        self._hold_new = False  # whether new requests wait until a decision names them
        self._released: set[str] = set()  # new requests that wait no longer for the window
        self._alone = False  # one request is admitted beyond the limit
        self._short = False  # the limit, not the pool, is why a running request must give way
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(patches.CREATE_PREFILL_BUDGET.apply_to(self.pool, self._wrap_budget))
            undo.callback(patches.CHECK_DECODE_CAPACITY.apply_to(self.pool, self._wrap_capacity))
            undo.callback(patches.GET_NEXT_BATCH.apply_to(self.scheduler, self._wrap_next))
            undo.callback(patches.GET_NEW_PREFILL.apply_to(self.scheduler, self._wrap_prefill))
            undo.callback(patches.UPDATE_RUNNING.apply_to(self.scheduler, self._wrap_running))
            if self.host is not None:
                undo.callback(patches.POLL_ABORTS.apply_to(self.scheduler, self._wrap_poll))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Give the scheduler its own functions back. Idempotent."""
        self._undo.close()

    # ---- the wrapped functions ----

    def _wrap_poll(self, original: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        def poll_timeout_aborts() -> list[Any]:
            news = original()
            if self.busy():
                decision = self.decide(in_step=True)
                if self.differs(decision):
                    news = [*news, decision]
            return news

        return poll_timeout_aborts

    def _wrap_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_next_batch_to_run(*args: Any, **kwargs: Any) -> Any:
            if not self.busy():  # the loop comes by all the time
                return original(*args, **kwargs)
            self._short = False
            plan = original(*args, **kwargs)
            if plan.batch_to_run is not None:  # else the engine waits for what a step in flight gives back
                self.step += 1
                self.settle(self.held(), sole=len(self._requests(plan.running_batch, plan.batch_to_run)) <= 1)
                if self._released:
                    self._released &= {request.rid for request in self.scheduler.waiting_queue}
            return plan

        return get_next_batch_to_run

    def _wrap_budget(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_prefill_budget(*args: Any, **kwargs: Any) -> Any:
            budget = original(*args, **kwargs)
            if not self._alone:
                budget.total_offset += self.reserve()
                budget.current_offset += self.reserve()
            return budget

        return create_prefill_budget

    def _wrap_capacity(self, original: Callable[..., bool]) -> Callable[..., bool]:
        """False makes the engine retract its next victim and ask again; with the last request it would abort that one,
        so whoever is alone is let through."""

        def check_decode_capacity(*args: Any, num_tokens: int, requests: Any = None, **kwargs: Any) -> bool:
            if self.quota.excess(self.held() + pages_for(num_tokens, self.page)):
                alone = requests is not None and len(requests) <= 1
                if not alone:
                    self._short = True
                if (num_tokens or not alone) and not self.quota.judge(granted=False, sole=alone).admitted:
                    return False
            return original(*args, num_tokens=num_tokens, requests=requests, **kwargs)

        return check_decode_capacity

    def _wrap_running(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_running_batch(*args: Any, **kwargs: Any) -> Any:
            before = len(self.scheduler.waiting_queue)
            batch = original(*args, **kwargs)
            if self._short:  # retracted requests are the only ones that come into the queue here
                self.quota.note_preempted(len(self.scheduler.waiting_queue) - before)
            return batch

        return update_running_batch

    def _wrap_prefill(self, original: Callable[..., Any]) -> Callable[..., Any]:
        scheduler = self.scheduler

        def get_new_batch_prefill_raw(*args: Any, running_batch: Any, **kwargs: Any) -> Any:
            if scheduler.chunked_req is not None:
                self._make_room(running_batch)
            with self._hidden(self._new_prefills()) as hidden:
                self.holds += bool(hidden)
                outcome = original(*args, running_batch=running_batch, **kwargs)
                if outcome[0] is None and scheduler.waiting_queue and self.reserve():
                    running_batch = outcome[1]
                    if self._nobody_runs(running_batch):
                        with self._hidden(scheduler.waiting_queue[1:]), self._going_alone():
                            outcome = original(*args, running_batch=running_batch, **kwargs)
                    elif scheduler.get_num_allocatable_reqs(len(running_batch.reqs), running_batch=running_batch) > 0:
                        self.quota.judge(granted=False, sole=False)
            return outcome

        return get_new_batch_prefill_raw

    @contextlib.contextmanager
    def _hidden(self, requests: Sequence[Any]) -> Any:
        """Keep these out of the waiting queue for a while; their place is then the back."""
        scheduler, out = self.scheduler, {id(request) for request in requests}
        if out:
            scheduler.waiting_queue = [request for request in scheduler.waiting_queue if id(request) not in out]
        try:
            yield requests
        finally:
            scheduler.waiting_queue = [*scheduler.waiting_queue, *requests] if out else scheduler.waiting_queue

    @contextlib.contextmanager
    def _going_alone(self) -> Any:
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            if self.scheduler.waiting_queue == []:  # it was the only one to be seen, and was taken
                self.quota.judge(granted=False, sole=True)

    # ---- decisions ----

    def decide(self, *, in_step: bool) -> Decision:
        """What the plugins want now: on the first rank, between two steps."""
        held, requests = self.held(), self.running()
        waiting = len(self.scheduler.waiting_queue)
        limit = self.ask_limit(held=held, running=len(requests), waiting=waiting, in_step=in_step)
        hold_new = self.window > 0.0
        release = self._over(requests) if hold_new and in_step else []
        return Decision(limit=limit, hold_new=hold_new, release=release)

    def differs(self, decision: Decision) -> bool:
        """Whether it has to be told. What is in force counts, not what was said: the engine may skip a message."""
        limit = self.quota.bounded(decision.limit)
        return bool(decision.release) or (limit, decision.hold_new) != (self.quota.limit, self._hold_new)

    def take(self, decision: Decision) -> None:
        """Put a decision in force, on every rank at the same place in the order of requests."""
        before = self.quota.limit
        self.put_limit(decision.limit, self.held())
        self._hold_new = decision.hold_new
        self._released.update(decision.release)
        if self.quota.limit > before:
            self.scheduler.running_batch.batch_is_full = False  # the engine asks again only when somebody leaves

    # ---- BLOCKS ----

    def reserve(self) -> int:
        """Tokens of the pool that requests may not have."""
        return self.quota.reserve() * self.page

    def _make_room(self, running_batch: Any) -> None:
        """A prompt that was begun goes on whatever the budget says, so others give way first."""
        scheduler, request = self.scheduler, self.scheduler.chunked_req
        tokens = len(request.full_untruncated_fill_ids) - request.prefix_len
        chunk = min(tokens, scheduler.chunked_prefill_size or tokens)
        while running_batch.reqs and self.quota.excess(self.held() + pages_for(chunk, self.page) + 1):
            order = list(running_batch._get_decode_retraction_order(running_batch.reqs))
            index = order.pop()
            victim = running_batch.reqs[index]
            if victim.beam_group is not None:
                break  # the engine aborts those rather than retract them
            running_batch.release_req(index, len(order))
            running_batch.filter_batch(keep_indices=sorted(order))
            scheduler._add_request_to_queue(victim, is_retracted=True)
            self.quota.note_preempted(1)

    def _nobody_runs(self, running_batch: Any) -> bool:
        """Whether letting the next request wait would be for ever. What a step in flight ends is still held."""
        scheduler = self.scheduler
        return running_batch.is_empty() and scheduler.chunked_req is None and not (self.held() and scheduler.last_batch)

    def held(self) -> int:
        """Blocks that requests hold. What the radix cache keeps for nobody in particular is evictable, so not held."""
        return self.total - int(self.pool.available_size() + self._evictable()) // self.page

    def _evictable(self) -> int:
        tree = self.scheduler.tree_cache
        return int(tree.full_evictable_size() if tree.supports_mamba() else tree.evictable_size())

    def counts(self) -> Counts:
        """One reading of the pool in blocks."""
        free, cached = self.pool.available_size() // self.page, self._evictable() // self.page
        return Counts(total=self.total, held=self.total - free - cached, cached=cached, free=free)

    # ---- BATCHING ----

    def _new_prefills(self) -> list[Any]:
        """Waiting requests that were never scheduled, when they are to wait one more step; else none."""
        if not self._hold_new:
            return []
        return [request for request in self._new() if request.rid not in self._released]

    def _new(self) -> Iterable[Any]:
        return (request for request in self.scheduler.waiting_queue if not request.retracted_stain)

    def _over(self, running: Sequence[Any]) -> list[str]:
        """The new requests that need not wait any longer, all at once; none while they are held."""
        scheduler = self.scheduler
        new = [request for request in self._new() if request.rid not in self._released]
        if not new:
            return []
        budget = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        step = BatchingStep(
            index=self.step,
            new_waiting=len(new),
            running=len(running),
            slots=scheduler.max_running_requests - len(running),
            waiting_tokens=sum(len(request.origin_input_ids) for request in new[:budget]),
            budget_tokens=budget,
            oldest_wait=self._clock() - min(request.time_stats.wait_queue_entry_time for request in new),
            arrivals_possible=True,
        )
        return [] if self.holds_new(step) else [request.rid for request in new]

    # ---- what is there ----

    def busy(self) -> bool:
        scheduler = self.scheduler
        return bool(
            scheduler.waiting_queue
            or scheduler.running_batch.reqs
            or scheduler.last_batch is not None
            or scheduler.chunked_req is not None
        )

    def running(self) -> list[Any]:
        """The requests that were scheduled and have not ended, between two steps."""
        return self._requests(self.scheduler.running_batch, self.scheduler.last_batch)

    def _requests(self, *batches: Any) -> list[Any]:
        """Those in the batches (a prefill joins the running batch a step later), and the one whose prompt goes on."""
        requests = [request for batch in batches if batch is not None for request in batch.reqs]
        if self.scheduler.chunked_req is not None:
            requests.append(self.scheduler.chunked_req)
        return list({id(request): request for request in requests if not request.finished()}.values())
