"""Our metrics on SGLang's HTTP server: the engine's counters, polled, and the latencies that this server sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.metrics import Exporter
from chunkllm_bridge.common.reporter import Reporter
from chunkllm_bridge.common.routes import Line
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.patches import sglang as patches

log = get_logger("sglang.metrics")


class Meter:
    """What this server measures and publishes while it lives. Make it once the engine has set its environment:
    prometheus_client looks at PROMETHEUS_MULTIPROC_DIR when it is imported."""

    def __init__(self, line: Line, spec: Spec, app: Any, *, shared: bool) -> None:
        """`shared`: SGLang has a /metrics of its own, which gathers from all processes what any registry of them holds.
        Otherwise there is one with our metrics alone."""
        registry = CollectorRegistry()
        if not shared:

            async def metrics() -> Response:
                return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

            app.add_api_route("/metrics", metrics, methods=["GET"], include_in_schema=False)
        self._reporter = Reporter(line, spec, exporter=Exporter(registry))

    def start(self, manager: Any, loop: asyncio.AbstractEventLoop) -> None:
        patches.BATCH_OUTPUT.apply_to(manager, Stopwatch(manager, self._reporter.observe).wrap)
        self._reporter.start(loop)


class Stopwatch:
    """Inter-token latencies, where a tokenizer manager gets batch outputs.

    From one output of a request to its next, over the tokens that came with it: a request that is not streamed gets
    them by the dozen (SGLANG_FORCE_STREAM_INTERVAL), and each of them counts. The first token has no such latency;
    where it comes with others, the scheduler says when it was made (with --enable-metrics).
    """

    def __init__(
        self,
        manager: Any,
        observe: Callable[[list[float], str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._requests: Container[str] = manager.rid_to_state
        self._observe, self._clock = observe, clock
        self._last: dict[str, tuple[float, int]] = {}  # request -> when its last output came, its tokens by then

    def wrap(self, original: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def handle_batch_output(batch: Any) -> Any:
            now = self._clock()
            done = await original(batch)  # which unpacks the time stamps of the scheduler
            try:
                if getattr(batch, "completion_tokens", None) is not None:  # embeddings have none
                    self.note(now, batch)
            except Exception as error:  # what escapes here ends the whole server (print_exception_wrapper)
                log.warning("metrics.failed", reason=str(error))
            return done

        return handle_batch_output

    def note(self, now: float, batch: Any) -> None:
        if latencies := list(self._latencies(now, batch)):
            replica = (getattr(batch, "dp_ranks", None) or [None])[0]  # one batch comes from one scheduler
            self._observe(latencies, str(replica or 0))
        if len(self._last) > 2 * len(batch.rids) + 1024:  # aborted requests have no last output
            self._last = {rid: row for rid, row in self._last.items() if rid in self._requests}

    def _latencies(self, now: float, batch: Any) -> Iterator[float]:
        stamps = getattr(batch, "time_stats", None) or [None] * len(batch.rids)
        rows = zip(batch.rids, batch.completion_tokens, batch.finished_reasons, stamps, strict=True)
        for rid, count, reason, stamp in rows:
            before = self._last.pop(rid, None) if reason is not None else self._last.get(rid)
            if before is None and count > 1 and 0 < (first := getattr(stamp, "prefill_finished_time", 0)) <= now:
                before = (first, 1)
            if before is not None and (fresh := count - before[1]) > 0:
                for _ in range(fresh):
                    yield (now - before[0]) / fresh
            if reason is None and count > 0 and (before is None or count != before[1]):
                self._last[rid] = (now, count)
