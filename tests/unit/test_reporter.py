"""Metrics while a server lives: what is polled, what is published, and what a failure costs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from chunkllm_bridge import DraftsPlan, DraftsStep, Plugin, PluginSpec, Seam
from chunkllm_bridge.common import reporter
from chunkllm_bridge.common.control import Command, Reply, Status, encode, merge
from chunkllm_bridge.common.latency import Alarm
from chunkllm_bridge.common.metrics import PREFIX, Exporter
from chunkllm_bridge.common.reporter import RANKS_EVERY, Reporter
from chunkllm_bridge.common.testing import FakeBridge, FakeEngine, attach


class Line:
    """To some engines of the same kind. Can be told to fail once."""

    def __init__(self, bridge: FakeBridge, engines: int = 1) -> None:
        self.bridge, self.engines = bridge, engines
        self.heard: list[Command] = []
        self.fails = False

    async def send(self, command: Command) -> Reply:
        self.heard.append(command)
        if self.fails:
            self.fails = False
            raise OSError("nobody there")
        return merge([Reply(**self.bridge.desk.handle(encode(command))) for _ in range(self.engines)])


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "INTERVAL", 0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def bridge() -> FakeBridge:
    engine = FakeEngine(ranks=2)
    engine.add(prompt=6, max_tokens=10)
    bridge = attach(engine, {"plugin.latency.p99": "100ms"})
    engine.run()
    return bridge


def run(made: Reporter, line: Line, readings: int) -> None:
    """Until it has asked so many times, and taken all but the last answer in."""

    async def wait() -> None:
        made.start(asyncio.get_running_loop())
        while len(line.heard) < readings + 1:
            await asyncio.sleep(0)
        assert made._task is not None
        made._task.cancel()

    asyncio.run(wait())


def read(registry: CollectorRegistry, name: str, engine: str = "0", **labels: Any) -> float | None:
    return registry.get_sample_value(PREFIX + name, {"engine": engine, **labels})


def test_what_the_engine_counted(bridge: FakeBridge, registry: CollectorRegistry) -> None:
    """Of every engine under its own number; counters once, however often they are read."""
    line = Line(bridge, engines=2)
    run(Reporter(line, bridge.host.spec, exporter=Exporter(registry)), line, 3)

    calls = bridge.status()["plugins"][1]["calls"]["plan_blocks"]
    for engine in ("0", "1"):
        assert calls == read(registry, "plugin_calls_total", engine, plugin="paged_kv", verb="plan_blocks")
        assert 1 == read(registry, "ranks_in_step", engine)


def test_the_workers_are_asked_now_and_then(bridge: FakeBridge, registry: CollectorRegistry) -> None:
    """They answer between two forward passes."""
    line = Line(bridge)
    run(Reporter(line, bridge.host.spec, exporter=Exporter(registry)), line, RANKS_EVERY + 1)

    asked = [command.workers for command in line.heard if isinstance(command, Status)]
    assert [0, RANKS_EVERY] == [at for at, workers in enumerate(asked) if workers]


class Echo(Plugin):
    spec = PluginSpec(name="echo", version="1", abi=(1, 1), seams={Seam.DRAFTS})

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan:
        return DraftsPlan(tokens=step.last_tokens[:, None])


def test_the_workers_are_asked_more_often_while_they_draft(registry: CollectorRegistry) -> None:
    """How drafts fare is counted there; once drafting is off they are left alone again."""
    engine = FakeEngine()
    bridge = attach(engine, {"speculative.plugin": "echo"}, Echo)
    engine.add(max_tokens=12)
    engine.run()
    line = Line(bridge)
    made = Reporter(line, bridge.host.spec, exporter=Exporter(registry))
    run(made, line, 4)
    asked = [command.workers for command in line.heard if isinstance(command, Status)]
    assert [True, False, True, False, True] == asked
    drafts = bridge.status()["speculation"]["drafts"]
    assert 0 < drafts == read(registry, "spec_drafts_total")
    assert 1 == read(registry, "spec_request_acceptance_length_count")

    bridge.set({"speculative.plugin": "none"})
    run(made, line, len(line.heard) + 2 * RANKS_EVERY)
    asked = [command.workers for command in line.heard if isinstance(command, Status)]
    assert 3 >= sum(asked[-2 * RANKS_EVERY :])
    assert drafts == read(registry, "spec_drafts_total")


def test_a_second_server_publishes_its_own_latencies_only(bridge: FakeBridge, registry: CollectorRegistry) -> None:
    """So that summing over all servers counts what the engine did once."""
    line = Line(bridge)
    made = Reporter(line, bridge.host.spec, first=False, exporter=Exporter(registry))
    made.observe([0.02], "0")
    run(made, line, 2)

    assert read(registry, "generation") is None
    assert 0.02 == pytest.approx(read(registry, "itl_p99_seconds"), rel=0.1)
    assert 1 == read(registry, "inter_token_latency_seconds_count")
    assert not any(command.workers for command in line.heard if isinstance(command, Status))


def test_a_failure_costs_a_reading(bridge: FakeBridge, registry: CollectorRegistry) -> None:
    line = Line(bridge)
    line.fails = True
    run(Reporter(line, bridge.host.spec, exporter=Exporter(registry)), line, 2)

    assert 1 == read(registry, "generation")


def test_an_alarm_is_told_once_and_its_level_can_be_set(
    bridge: FakeBridge, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """While serving, as any parameter that may change then."""
    line = Line(bridge)
    made = Reporter(line, bridge.host.spec, exporter=Exporter(registry))
    made.observe([0.05] * Alarm.MIN_SAMPLES, "0")
    with caplog.at_level(logging.WARNING, "chunkllm"):
        run(made, line, 2)
        assert 0 == read(registry, "itl_alarm")

        bridge.set({"plugin.latency.p99": "20ms"})
        run(made, line, len(line.heard) + 2)

    assert (1, 1) == (read(registry, "itl_alarm"), read(registry, "itl_alarms_total"))
    assert 1 == caplog.text.count("latency.alarm")
