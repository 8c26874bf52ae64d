"""Metrics while a server lives: the engine's counters, polled, and the latencies that this server sees."""

from __future__ import annotations

import asyncio

from chunkllm_bridge.common.control import Status
from chunkllm_bridge.common.latency import Alarm, LatencySketch
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.metrics import Exporter, Sample, samples
from chunkllm_bridge.common.routes import Line
from chunkllm_bridge.common.spec import Spec

log = get_logger("reporter")

INTERVAL = 1.0
"""Seconds between two readings of the engine's counters."""

RANKS_EVERY = 10
"""Readings of which one asks the workers too: they answer between two forward passes, so not each time."""

RANKS_EVERY_DRAFTING = 2
"""The same while they draft: how the drafts fare is counted there."""


class Reporter:
    """Publishes from `start` on. A failure here costs a reading, never a request."""

    def __init__(self, line: Line, spec: Spec, *, first: bool = True, exporter: Exporter | None = None) -> None:
        """Of several servers before one engine only the `first` publishes what the engine counted."""
        self._line, self._first = line, first
        self._exporter = exporter or Exporter()
        self._itl = LatencySketch()
        self._alarm = Alarm(spec["plugin.latency.p99"])
        self._readings = 0
        self._ranks_every = RANKS_EVERY if spec["speculative.plugin"] is None else RANKS_EVERY_DRAFTING
        self._task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._poll(), name="chunkllm-metrics")

    def observe(self, latencies: list[float], engine: str) -> None:
        """Inter-token latencies in seconds, as the server sees them; on the loop's thread."""
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
        reply = await self._line.send(Status(workers=self._first and self._readings % self._ranks_every == 0))
        self._readings += 1
        self._alarm.level = reply.data["alarms"]["latency_p99"]  # can be set while serving
        self._exporter.publish(self._latency_samples(), "0")
        if self._first:
            for index, status in enumerate(reply.data.get("engines", [reply.data])):
                self._exporter.publish(samples(status), str(index))
                if speculation := status.get("speculation"):
                    self._exporter.publish_lengths(speculation["finished"], str(index))
                    self._ranks_every = RANKS_EVERY_DRAFTING if speculation["limit"] else RANKS_EVERY

    def _latency_samples(self) -> list[Sample]:
        p99, number = self._itl.quantile(0.99)
        if self._alarm.update(p99, number):
            log.warning("latency.alarm", p99_ms=round(p99 * 1e3, 1), level_ms=round(self._alarm.level * 1e3, 1))
        rows: list[Sample] = [("itl_alarm", {}, self._alarm.on), ("itl_alarms", {}, self._alarm.raised)]
        return rows if number == 0 else [*rows, ("itl_p99_seconds", {}, p99)]
