"""Our metrics on vLLM's own /metrics: the latencies come from vLLM's statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.reporter import Reporter
from chunkllm_bridge.common.routes import Line
from chunkllm_bridge.common.spec import Spec

log = get_logger("vllm.metrics")


def reporter_for(engine_client: Any, line: Line, spec: Spec) -> Reporter:
    """One that hears the latencies of this API server; still to be started."""
    reporter = Reporter(line, spec, first=getattr(engine_client.engine_core, "client_index", 0) == 0)
    manager = engine_client.logger_manager
    if manager is None:
        log.info("metrics.no_latencies", reason="--disable-log-stats is set")
    else:
        manager.stat_loggers.append(ItlLogger(reporter.observe))
    return reporter


class ItlLogger:
    """Has the shape of vLLM's aggregate stat loggers (`v1/metrics/loggers.py`), of which only `record` matters here."""

    def __init__(self, observe: Callable[[list[float], str], None]) -> None:
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
