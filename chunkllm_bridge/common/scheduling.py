"""What a scheduler's bridge asks and keeps, whatever engine the scheduler is of: the limit, the window, the count."""

from __future__ import annotations

from typing import Any

from chunkllm_bridge.common.abi import BatchingStep, BlocksStep, EngineInfo
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.pool import pool_status
from chunkllm_bridge.common.quota import Counts, PoolQuota

log = get_logger("scheduling")


class Scheduling:
    """The adapter's `SchedulerBridge` tells it what is there; it asks the plugins, and remembers what came of it.

    `host` is None on a rank that follows: what the first rank decided is only put in force there.
    """

    def __init__(self, host: Host | None, total: int) -> None:
        self.host, self.total = host, total  # blocks that requests could hold
        self.quota = PoolQuota(max(1, total))
        self.step = 0
        self.holds = 0  # steps in which new prefills were held

    def ask_limit(self, *, held: int, running: int, waiting: int, in_step: bool) -> int | None:
        """What the plugins allow requests to hold now, in blocks; None for all."""
        assert self.host is not None
        step = BlocksStep(
            index=self.step,
            total=self.total,
            held=held,
            available=self.total - held,
            running=running,
            waiting=waiting,
        )
        return self.host.block_limit(step, in_step=in_step)

    def put_limit(self, limit: int | None, held: int) -> None:
        before = self.quota.limit
        self.quota.set_limit(limit)
        if self.quota.limit != before and self.host is not None:
            log.info("kv.quota", limit=self.quota.limit, total=self.total, held=held)

    @property
    def window(self) -> float:
        """Seconds that any plugin may hold new prefills; 0.0: none is asked."""
        return 0.0 if self.host is None else self.host.window

    def holds_new(self, step: BatchingStep) -> bool:
        """Whether the new prefills wait one more step."""
        return self.host is not None and self.host.hold(step)

    def settle(self, held: int, *, sole: bool) -> None:
        """The step is scheduled: count, and tell the plugins. `sole`: at most one request holds blocks."""
        self.quota.observe(held, sole=sole)
        if self.host is not None:
            self.host.settle_limit(self.step, held)

    def counts(self) -> Counts:
        """One reading of the engine's pool, in blocks."""
        raise NotImplementedError

    def status(self, about: EngineInfo) -> dict[str, Any]:
        """The "kv" part of the status."""
        assert self.host is not None
        return pool_status(self.counts(), self.quota, about, self.host.spec, holds=self.holds, steps=self.step)
