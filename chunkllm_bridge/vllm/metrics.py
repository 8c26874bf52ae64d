"""Our metrics on vLLM's own /metrics: the engine's counters, polled, and the latencies that this server sees."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from chunkllm_bridge.common.control import Command, Reply, Status
from chunkllm_bridge.common.latency import Alarm, LatencySketch
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.metrics import Exporter, Sample, samples
from chunkllm_bridge.common.spec import Spec

log = get_logger("vllm.metrics")

INTERVAL = 1.0
"""Seconds between two readings of the engine's counters."""

RANKS_EVERY = 10
"""Readings of which one asks the workers too: they answer between two forward passes, so not each time."""


class Sender(Protocol):
    async def send(self, command: Command) -> Reply: ...


class Reporter:
    """Publishes while the API server lives. A failure here costs a reading, never a request."""

    def __init__(self, engine_client: Any, line: Sender, spec: Spec) -> None:
        self._client, self._line = engine_client, line
        self._exporter = Exporter()
        self._itl = LatencySketch()
        self._alarm = Alarm(spec["plugin.latency.p99"])
        self._first = getattr(engine_client.engine_core, "client_index", 0) == 0
        self._readings = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        manager = self._client.logger_manager
        if manager is None:
            log.info("metrics.no_latencies", reason="--disable-log-stats is set")
        else:
            manager.stat_loggers.append(ItlLogger(self._observe))
        self._task = loop.create_task(self._poll(), name="chunkllm-metrics")

    def _observe(self, latencies: list[float], engine: str) -> None:
        self._exporter.observe_itl(latencies, engine)
        self._itl.observe(latencies)

    async def _poll(self) -> None:
        while True:
            try:
                await self._report()
            except Exception as error:  # the engine may be going down, or busy: the next reading is a second away
                log.debug("metrics.missed", reason=str(error))
            await asyncio.sleep(INTERVAL)

    async def _report(self) -> None:
        reply = await self._line.send(Status(workers=self._first and self._readings % RANKS_EVERY == 0))
        self._readings += 1
        self._alarm.level = reply.data["alarms"]["latency_p99"]  # can be set while serving
        self._exporter.publish(self._latency_samples(), "0")
        if self._first:
            for index, status in enumerate(reply.data.get("engines", [reply.data])):
                self._exporter.publish(samples(status), str(index))

    def _latency_samples(self) -> list[Sample]:
        p99, number = self._itl.quantile(0.99)
        if self._alarm.update(p99, number):
            log.warning("latency.alarm", p99_ms=round(p99 * 1e3, 1), level_ms=round(self._alarm.level * 1e3, 1))
        rows: list[Sample] = [("itl_alarm", {}, self._alarm.on), ("itl_alarms", {}, self._alarm.raised)]
        return rows if number == 0 else [*rows, ("itl_p99_seconds", {}, p99)]


class ItlLogger:
    """Has the shape of vLLM's aggregate stat loggers (`v1/metrics/loggers.py`), of which only `record` matters here."""

    def __init__(self, observe: Any) -> None:
        self._observe = observe

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        try:
            if iteration_stats is not None and iteration_stats.inter_token_latencies_iter:
                self._observe(iteration_stats.inter_token_latencies_iter, str(engine_idx))
        except Exception as error:  # what escapes here ends the handler of all outputs (async_llm.py)
            log.warning("metrics.failed", reason=str(error))

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...

    def record_admission_rejection(self, reason: str) -> None: ...
