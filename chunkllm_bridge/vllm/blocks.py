"""KV quotas and batch windows on vLLM's scheduler: the engine's own object, with four functions wrapped."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from chunkllm_bridge.common.abi import BatchingStep
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.quota import Counts
from chunkllm_bridge.common.scheduling import Scheduling
from chunkllm_bridge.patches import vllm as patches

NEEDED = ("kv_cache_manager", "requests", "running", "waiting", "add_request", "schedule", "_preempt_request")
"""What a scheduler must have, whoever wrote it."""
LARGE = 20_000
"""Blocks of a pool that takes more than a moment to walk."""


class SchedulerBridge(Scheduling):
    """Asks the host once per step, and enforces what it answers. Lives as long as the scheduler."""

    def __init__(
        self,
        scheduler: Any,
        host: Host,
        *,
        arrivals_possible: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if lacking := [name for name in NEEDED if not hasattr(scheduler, name)]:
            kind = f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
            raise IncompatibleError("the scheduler", [f"{kind} has no {', '.join(lacking)} (--scheduler-cls?)"])
        self.scheduler, self.pool = scheduler, scheduler.kv_cache_manager.block_pool
        super().__init__(host, self.pool.num_gpu_blocks - 1)  # without the null block, which is never a request's
        self._arrivals_possible = arrivals_possible
        self._clock = clock
        self._arrived: dict[str, float] = {}  # request id -> when the scheduler got it, until it is first scheduled
        self._allocating = False
        self._cached, self._count_again = 0, 0.0  # the last count of cached blocks, and when it is too old
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        manager = self.scheduler.kv_cache_manager
        with contextlib.ExitStack() as undo:
            undo.callback(patches.GET_NUM_FREE_BLOCKS.apply_to(self.pool, self._wrap_free))
            undo.callback(patches.ALLOCATE_SLOTS.apply_to(manager, self._wrap_allocate))
            undo.callback(patches.ADD_REQUEST.apply_to(self.scheduler, self._wrap_add))
            undo.callback(patches.SCHEDULE.apply_to(self.scheduler, self._wrap_schedule))
            self._undo = undo.pop_all()
        self.refresh_limit()

    def close(self) -> None:
        """Give the scheduler its own functions back. Idempotent."""
        self._undo.close()

    # ---- the wrapped functions ----

    def _wrap_free(self, original: Callable[[], int]) -> Callable[[], int]:
        self._engine_free = original

        def get_num_free_blocks() -> int:
            free = original()
            return self.quota.hidden_free(free) if self._allocating else free

        return get_num_free_blocks

    def _wrap_allocate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        quota = self.quota

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            if quota.reserve() == 0:  # no limit: the engine's own way
                return original(request, *args, **kwargs)
            self._allocating = True
            try:
                blocks = original(request, *args, **kwargs)
            finally:
                self._allocating = False
            if blocks is None and quota.judge(granted=False, sole=self._sole(request)).overdraft:
                blocks = original(request, *args, **kwargs)  # a quota below one request still lets one through
            return blocks

        return allocate_slots

    def _wrap_add(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._arrived.setdefault(request.request_id, self._clock())
            return original(request, *args, **kwargs)

        return add_request

    def _wrap_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            self.step += 1
            if self.quota.excess(self.refresh_limit(in_step=True)):
                self._preempt_down()
            held = self._new_prefills()
            if held:
                self.holds += 1
                waiting = self.scheduler.waiting
                waiting.remove_requests(set(held))
                try:
                    output = original(*args, **kwargs)
                finally:
                    for request in held:  # new requests stand behind preempted ones, so their place is the back
                        waiting.add_request(request)
            else:
                output = original(*args, **kwargs)
            if self._arrived:
                for new in output.scheduled_new_reqs:
                    self._arrived.pop(new.req_id, None)
                self._forget_gone()
            self.settle(self.held(), sole=len(self.scheduler.running) <= 1)
            return output

        return schedule

    # ---- BLOCKS ----

    def refresh_limit(self, *, in_step: bool = False) -> int:
        """Ask the plugins for the limit and put it in force. Returns what is held now."""
        held, scheduler = self.held(), self.scheduler
        limit = self.ask_limit(
            held=held, running=len(scheduler.running), waiting=len(scheduler.waiting), in_step=in_step
        )
        self.put_limit(limit, held)
        return held

    def _preempt_down(self) -> None:
        """Preempt the requests that the engine itself would, until what is held fits or one of them is left."""
        scheduler = self.scheduler
        while len(scheduler.running) > 1 and self.quota.excess(self.held()):
            victim = self._victim()
            if not scheduler._request_blocks_can_be_freed(victim):
                break  # a step in flight still writes there; it lands before the next call
            scheduler.running.remove(victim)
            scheduler._preempt_request(victim, time.monotonic(), drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)
            self.quota.note_preempted(1)

    def _victim(self) -> Any:
        """As in `Scheduler.schedule`: the least important, or the one that came last."""
        running = self.scheduler.running
        if self.scheduler.policy.value == "priority":
            return max(running, key=lambda request: (request.priority, request.arrival_time))
        return running[-1]

    def _sole(self, request: Any) -> bool:
        running = self.scheduler.running
        return not running or (len(running) == 1 and running[0] is request)

    def held(self) -> int:
        return int(self.total - self._engine_free())

    def counts(self) -> Counts:
        """One reading of the pool in blocks. Cached blocks have content but no holder, so they are evictable.

        Counting them walks the pool (5 to 15 ms for 100,000 blocks) while the engine waits, and metrics ask every
        second: of a large pool they are counted anew only so often that it costs 0.2 % of the time.
        """
        free, now = self._engine_free(), time.perf_counter()
        if now >= self._count_again:
            self._cached = sum(1 for block in self.pool.blocks if block.ref_cnt == 0 and block.block_hash is not None)
            self._count_again = now + (500 * (time.perf_counter() - now) if self.total > LARGE else 0)
        cached = min(self._cached, free)
        return Counts(total=self.total, held=self.total - free, cached=cached, free=free - cached)

    # ---- BATCHING ----

    def _new_prefills(self) -> list[Any]:
        """Waiting requests that were never scheduled, when they are to wait one more step; else none."""
        if not self._arrived or self.window == 0.0:
            return []
        scheduler, arrived = self.scheduler, self._arrived
        new = [request for request in scheduler.waiting if request.request_id in arrived]
        if not new:
            return []
        budget = scheduler.max_num_scheduled_tokens
        step = BatchingStep(
            index=self.step,
            new_waiting=len(new),
            running=len(scheduler.running),
            slots=scheduler.max_num_running_reqs - len(scheduler.running),
            waiting_tokens=sum(request.num_prompt_tokens for request in itertools.islice(new, budget)),
            budget_tokens=budget,
            oldest_wait=self._clock() - min(arrived[request.request_id] for request in new),
            arrivals_possible=self._arrivals_possible,
        )
        return new if self.holds_new(step) else []

    def _forget_gone(self) -> None:
        """Drop arrival times of requests that were aborted before they were scheduled."""
        if len(self._arrived) > len(self.scheduler.waiting):
            known = self.scheduler.requests
            self._arrived = {key: when for key, when in self._arrived.items() if key in known}
