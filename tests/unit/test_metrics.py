"""What is counted is exact, also over several processes."""

from __future__ import annotations

import bisect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from chunkllm_bridge import BlocksPlan, BlocksStep, Plugin, PluginSpec, Seam
from chunkllm_bridge.common.acceptance import BOUNDS
from chunkllm_bridge.common.metrics import FAMILIES, PREFIX, REQUEST_LENGTH, Exporter, Sample, samples
from chunkllm_bridge.common.testing import FakeBridge, FakeEngine, attach


@attrs.frozen(kw_only=True)
class Size:
    size: int = 9


class Mine(Plugin):
    """Fails at every fourth step."""

    spec = PluginSpec(name="mine", version="1", abi=(1, 0), seams={Seam.BLOCKS})
    Config = Size

    def plan_blocks(self, step: BlocksStep) -> BlocksPlan:
        if step.index % 4 == 3:
            raise ValueError("every fourth")
        return BlocksPlan(limit=self.config.size)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def bridge() -> FakeBridge:
    engine = FakeEngine()
    for _ in range(5):
        engine.add(prompt=6, max_tokens=10)
    return attach(engine, {"plugins.mine.error_rate": 1, "plugins.mine.size": 9, "plugin.batch_window": "10ms"}, Mine)


def read(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, {"engine": "0", **labels})


def test_every_sample_is_one_that_is_declared(bridge: FakeBridge) -> None:
    """With the labels in the order in which they are declared; the help text is there for all."""
    bridge.engine.run()
    families = {family.name: family for family in FAMILIES}

    for name, labels, _ in samples(bridge.status()):
        assert families[name].labels == tuple(labels)
    assert all(family.text.endswith(".") for family in FAMILIES)


def test_metrics_are_the_pool_s_own_numbers(registry: CollectorRegistry, bridge: FakeBridge) -> None:
    """Free, held and cached are told apart in every state: empty, full, preempting, lowered, at the end. Case:
    vllm#20302, where cached blocks counted as used."""
    exporter, engine, seen = Exporter(registry), bridge.engine, set()
    for step in range(60):
        if step == 8:
            bridge.set({"plugins.mine.size": 4})
        engine.step()
        exporter.publish(samples(bridge.status()), "0")
        counts = engine.pool.counts
        held = sum(request.lease.units for request in engine.requests if request.lease)
        seen.add((counts.held > 0, counts.cached > 0))

        assert (counts.free, held, counts.cached) == tuple(
            read(registry, "kv_blocks", state=state) for state in ("free", "held", "cached")
        )
        assert 1 == read(registry, "kv_conserved")
    assert {(True, False), (True, True), (False, True)} <= seen
    assert (4, 24) == (read(registry, "kv_limit_blocks"), read(registry, "kv_total_blocks"))


def test_counters_are_exact(registry: CollectorRegistry, bridge: FakeBridge) -> None:
    """However often they are read: calls, failures, denials, holds, seconds."""
    exporter = Exporter(registry)
    while bridge.engine.waiting or bridge.engine.running:
        bridge.engine.step()
        for _ in range(bridge.engine.index % 3):
            exporter.publish(samples(bridge.status()), "0")
    exporter.publish(samples(bridge.status()), "0")

    status = bridge.status()
    mine = next(plugin for plugin in status["plugins"] if plugin["name"] == "mine")
    assert mine["calls"]["plan_blocks"] == read(registry, "plugin_calls_total", plugin="mine", verb="plan_blocks")
    assert mine["failures"]["exception"] == read(registry, "plugin_failures_total", plugin="mine", kind="exception")
    assert 0 < status["kv"]["denied"] == read(registry, "kv_denied_total")
    assert 0 < status["kv"]["window_holds"] == read(registry, "batch_holds_total")


def rows(generation: int, calls: int, **more: Any) -> list[Sample]:
    return [
        ("plugin_active", {"plugin": "mine", "generation": str(generation)}, 1),
        ("plugin_calls", {"plugin": "mine", "verb": "plan_blocks"}, calls),
        ("kv_denied", {}, more.get("denied", 0)),
    ]


@pytest.mark.parametrize("calls", [3, 10, 30])
def test_a_new_generation_counts_from_zero(registry: CollectorRegistry, calls: int) -> None:
    """Whether it has been called less or more often than the one before; the engine's own counters go on."""
    exporter = Exporter(registry)
    exporter.publish(rows(1, 10, denied=5), "0")
    exporter.publish(rows(2, calls, denied=6), "0")
    exporter.publish(rows(2, calls + 1, denied=6), "0")

    assert 10 + calls + 1 == read(registry, "plugin_calls_total", plugin="mine", verb="plan_blocks")
    assert 6 == read(registry, "kv_denied_total")


def test_a_series_that_is_over_falls_to_zero(registry: CollectorRegistry) -> None:
    """Only one generation of a plugin is active, on each engine for itself."""
    exporter = Exporter(registry)
    exporter.publish(rows(1, 1), "0")
    exporter.publish(rows(1, 1), "1")
    exporter.publish(rows(2, 1), "0")

    assert (None, 1) == tuple(
        registry.get_sample_value(f"{PREFIX}plugin_active", {"engine": "0", "plugin": "mine", "generation": g})
        for g in "12"
    )
    labels = {"engine": "1", "plugin": "mine", "generation": "1"}
    assert 1 == registry.get_sample_value(f"{PREFIX}plugin_active", labels)


def test_a_disabled_plugin_has_no_series(registry: CollectorRegistry) -> None:
    bridge = attach(FakeEngine(), {"plugin.disable": "everything"})
    Exporter(registry).publish(samples(bridge.status()), "0")

    assert read(registry, "plugin_skipped_total", plugin="paged_kv") is None


def test_metrics_are_registered_once(registry: CollectorRegistry) -> None:
    """A second exporter on one registry is a bug that is told, not two series. Case: vllm#10443."""
    Exporter(registry)

    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Exporter(registry)


class TestSpeculation:
    DRAFTS: ClassVar[dict[str, Any]] = {
        "plugin": "medusa",
        "limit": 4,
        "launched": 4,
        "nodes": 4,
        "width": 3,
        "stepped_aside": "",
        "drafts": 10,
        "draft_tokens": 30,
        "accepted": 12,
        "sources": {
            "heads": {"drafts": 6, "draft_tokens": 18, "accepted": 3},
            "text": {"drafts": 4, "draft_tokens": 12, "accepted": 9},
        },
        "accepted_at": [8, 4],
        "acceptance_length": 2.2,
        "acceptance_length_total": 2.1,
        "finished": [],
    }

    def test_drafts_are_counted_under_one_name_on_every_engine(
        self, registry: CollectorRegistry, bridge: FakeBridge
    ) -> None:
        exporter = Exporter(registry)
        exporter.publish(samples({**bridge.status(), "speculation": self.DRAFTS}), "0")
        more = {**self.DRAFTS, "drafts": 15, "accepted_at": [9, 5, 1], "stepped_aside": "useless", "limit": 0}
        exporter.publish(samples({**bridge.status(), "speculation": more}), "0")

        names = ("spec_drafts_total", "spec_draft_tokens_total", "spec_accepted_tokens_total")
        assert (15, 30, 12) == tuple(read(registry, name) for name in names)
        assert (9, 5, 1) == tuple(read(registry, "spec_accepted_at_total", position=at) for at in "123")
        gauges = ("spec_acceptance_length", "spec_limit", "spec_width", "spec_stepped_aside")
        assert (2.2, 0, 3, 1) == tuple(read(registry, name) for name in gauges)

    def test_sources_have_series_of_their_own(self, registry: CollectorRegistry, bridge: FakeBridge) -> None:
        """By name; one that comes later gets its series then."""
        exporter = Exporter(registry)
        exporter.publish(samples({**bridge.status(), "speculation": self.DRAFTS}), "0")
        more = {"heads": {"drafts": 7, "draft_tokens": 9, "accepted": 4}, "tail": {"drafts": 2, "accepted": 1}}
        exporter.publish(samples({**bridge.status(), "speculation": {**self.DRAFTS, "sources": more}}), "0")

        names = ("spec_source_drafts_total", "spec_source_accepted_tokens_total")
        found = [tuple(read(registry, name, source=source) for name in names) for source in ("heads", "text", "tail")]
        assert [(7, 4), (4, 9), (2, 1)] == found

    def test_every_series_is_declared(self, bridge: FakeBridge) -> None:
        families = {family.name: family for family in FAMILIES}
        for name, labels, _ in samples({**bridge.status(), "speculation": self.DRAFTS}):
            assert families[name].labels == tuple(labels)

    def test_lengths_of_finished_requests_add_up(self, registry: CollectorRegistry) -> None:
        """Each once, in its bucket, with the exact sum; an engine that starts anew counts from zero."""
        exporter = Exporter(registry)
        buckets: list[list[float]] = [[0, 0.0] for _ in range(len(BOUNDS) + 1)]

        def end(length: float) -> None:
            bucket = buckets[bisect.bisect_left(BOUNDS, length)]
            bucket[0] += 1
            bucket[1] += length

        def seen() -> tuple[float | None, ...]:
            name = REQUEST_LENGTH
            return (
                *(read(registry, f"{name}_count"), read(registry, f"{name}_sum")),
                *(read(registry, f"{name}_bucket", le=bound) for bound in ("1.0", "2.25", "+Inf")),
            )

        for length in (1.0, 2.1, 2.2, 99.0):
            end(length)
            exporter.publish_lengths(buckets, "0")
            exporter.publish_lengths(buckets, "0")
        assert (4, pytest.approx(104.3), 1, 3, 4) == seen()
        end(2.05)
        end(2.15)
        exporter.publish_lengths(buckets, "0")
        assert (6, pytest.approx(108.5), 1, 5, 6) == seen()

        exporter.publish_lengths([[1, 1.0], *([0, 0.0] for _ in BOUNDS)], "0")
        assert (7, pytest.approx(109.5), 2, 6, 7) == seen()


PROCESS = """
import sys
from prometheus_client import CollectorRegistry
from chunkllm_bridge.common.metrics import Exporter

number = int(sys.argv[1])
exporter = Exporter(CollectorRegistry())
for denied in (1, 4, 4, 10):
    exporter.publish([("kv_denied", {}, denied * number), ("itl_p99_seconds", {}, number), ("kv_blocks",
        {"state": "held"}, number)], "0")
exporter.observe_itl([0.01] * number, "0")
print("ready", flush=True)
sys.stdin.read()
"""


def test_several_processes_sum_exactly(tmp_path: Path) -> None:
    """Three processes count, and the sum is right; one is killed: what it counted stays, what it showed goes. Cases:
    vllm#7279, vllm#18053, kserve#2979, prometheus-fastapi-instrumentator#282."""
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(number)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2, 3)
    ]

    def seen() -> dict[str, float | None]:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
        return {
            "denied": read(registry, "kv_denied_total"),
            "observed": read(registry, "inter_token_latency_seconds_count"),
            "p99": read(registry, "itl_p99_seconds"),
        }

    try:
        assert ["ready"] * 3 == [server.stdout.readline().strip() for server in servers if server.stdout]
        assert {"denied": 60, "observed": 6, "p99": 3} == seen()

        servers[2].send_signal(signal.SIGKILL)
        servers[2].wait()
        mark_process_dead(servers[2].pid, str(tmp_path))  # type: ignore[no-untyped-call]

        assert {"denied": 60, "observed": 6, "p99": 2} == seen()
        for server in servers[:2]:
            server.communicate()
            mark_process_dead(server.pid, str(tmp_path))  # type: ignore[no-untyped-call]
        assert {"denied": 60, "observed": 6, "p99": None} == seen()
    finally:
        for server in servers:
            server.kill()
            server.communicate()
