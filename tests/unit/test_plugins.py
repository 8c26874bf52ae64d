"""The built-in plugins, alone and at work in the fake engine."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkllm_bridge import BatchingStep, BlocksPlan, BlocksStep, EngineInfo, Preparation
from chunkllm_bridge.common.fake import GIB
from chunkllm_bridge.common.testing import FakeBridge, FakeEngine, attach
from chunkllm_bridge.plugins import batch_window, paged_kv
from chunkllm_bridge.plugins.batch_window import BatchWindow
from chunkllm_bridge.plugins.paged_kv import PagedKV

INFO = FakeEngine().info


def prepared(plugin: Any, info: EngineInfo = INFO) -> Any:
    plugin.prepare(Preparation(info=info, generation=1, lease_memory=lambda nbytes: None))
    return plugin


def served(engine: FakeEngine, bridge: FakeBridge | None = None) -> int:
    """Run to the end; the most blocks that were held after any step."""
    most = 0
    while engine.waiting or engine.running:
        engine.step()
        most = max(most, sum(request.lease.units for request in engine.running if request.lease))
    return most


class TestPagedKV:
    STEP = BlocksStep(index=1, total=24, held=0, available=24, running=0, waiting=0)

    @pytest.mark.parametrize(
        ("ratio", "limit"), [(0.25, 16), (1.0, 64), (1 / 64, 1), (0.0156, 1), (1e-9, 1), (0.26, 16)]
    )
    def test_limit_is_whole_blocks_of_the_device(self, ratio: float, limit: int) -> None:
        """Rounded down, to one block at least: a quota that holds nothing would stop the engine."""
        plugin = prepared(PagedKV(paged_kv.Config(memory_ratio=ratio)))

        assert BlocksPlan(limit=limit) == plugin.plan_blocks(self.STEP)

    def test_the_device_is_the_engine_s_word(self) -> None:
        """The share is of what this process may use, not of what others have left. Case: kvcached#448."""
        small = attrs.evolve(INFO, device_memory=32 * GIB)
        plugin = prepared(PagedKV(paged_kv.Config(memory_ratio=0.25)), small)

        assert BlocksPlan(limit=8) == plugin.plan_blocks(self.STEP)

    def test_engine_means_no_limit(self) -> None:
        plugin = prepared(PagedKV(paged_kv.Config()))

        assert plugin.plan_blocks(self.STEP) is None

    def test_a_pool_of_unknown_block_size_is_refused(self) -> None:
        """A share of memory cannot be counted in it."""
        unknown = attrs.evolve(INFO, block_bytes=0)
        no_pool = attrs.evolve(unknown, total_blocks=0)

        assert ["fake does not say how many bytes a KV block has"] == PagedKV(paged_kv.Config(memory_ratio=0.25)).check(
            unknown
        )
        assert () == PagedKV(paged_kv.Config(memory_ratio=0.25)).check(no_pool)
        assert () == PagedKV(paged_kv.Config()).check(unknown)

    def test_a_quota_cut_and_raised_while_eight_streams_run(self) -> None:
        """Never above it, except for a request that is alone; every token as without it; nothing held at the end.
        Cases: kvcached#262, #301 and #453."""

        def streams(engine: FakeEngine) -> None:
            for number in range(8):
                engine.add(prompt=4 + number, max_tokens=24)

        stock, engine = FakeEngine(blocks=64), FakeEngine(blocks=64)
        streams(stock)
        streams(engine)
        bridge = attach(engine, {"kv_cache.memory_ratio": 32 / 64})
        for ratio, steps in ((32, 9), (8, 12), (3, 9), (48, 1_000)):
            bridge.set({"kv_cache.memory_ratio": ratio / 64})
            for _ in range(steps):
                if engine.waiting or engine.running:
                    engine.step()
                    held = engine.pool.counts.held
                    assert held <= ratio or len(engine.running) <= 1

        assert stock.run() == engine.run()
        assert (0, 0) == (engine.pool.counts.held, bridge.quota.violations)
        assert 0 < bridge.quota.preempted
        assert 0 < bridge.quota.denied

    def test_a_quota_below_one_request_still_serves(self) -> None:
        """One after the other; whoever runs alone may go beyond, and it is counted. Case: vllm#46283, no request is
        admitted any more."""
        engine = FakeEngine()
        for _ in range(3):
            engine.add(prompt=10, max_tokens=10)
        bridge = attach(engine, {"kv_cache.memory_ratio": 1 / 64})

        most = served(engine)

        assert all(request.finished for request in engine.requests)
        assert 5 == most
        assert 0 < bridge.quota.overdrafts

    def test_twenty_five_hundred_requests_leave_nothing_behind(self) -> None:
        """Staggered lengths, aborts in every state: never above the quota, and at the end nothing is held. Cases:
        kvcached#359, vllm#44100, LMCache#1285."""
        numbers = random.Random(0)
        engine = FakeEngine(blocks=128, max_running=32, budget_tokens=512)
        bridge = attach(engine, {"kv_cache.memory_ratio": 40 / 64})
        states = set()
        for _ in range(2_500):
            engine.add(prompt=numbers.randint(1, 40), max_tokens=numbers.randint(1, 16))
            while len(engine.waiting) > 20:
                engine.step()
                assert engine.pool.counts.held <= 40
            if numbers.random() < 0.2:
                request = numbers.choice(engine.requests[-60:])
                states.add((request in engine.waiting, request in engine.running))
                engine.abort(request)
        engine.run()

        assert {(True, False), (False, True), (False, False)} == states
        assert (0, ()) == (engine.pool.counts.held, engine.pool.owners())
        assert 0 == bridge.quota.violations

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_nothing_is_lost_in_any_history(self, data: st.DataObject) -> None:
        """Quotas, stolen pages, failures at every k-th page, rolled-back steps and aborts, at any time: everybody who
        stays gets the very tokens of an undisturbed run. Cases: kvcached#262 and #301, vllm#46283, vllm#23347."""
        engine = FakeEngine(blocks=24)
        requests = [engine.add(prompt=5 + number, max_tokens=9 + number) for number in range(6)]
        bridge = attach(engine, {"kv_cache.memory_ratio": 24 / 64, "plugin.batch_window": "10ms"})
        for _ in range(data.draw(st.integers(0, 25))):
            match data.draw(st.sampled_from(["step", "step", "quota", "steal", "fail", "abort", "roll back"])):
                case "step":
                    engine.step()
                case "quota":
                    bridge.set({"kv_cache.memory_ratio": data.draw(st.integers(1, 24)) / 64})
                case "steal":
                    engine.faults.steal = data.draw(st.integers(1, 24))
                case "fail":
                    engine.faults.fail_at_page = data.draw(st.integers(1, 6))
                case "abort":
                    engine.abort(data.draw(st.sampled_from(requests)))
                case "roll back":
                    engine.faults.aborted_steps.add(engine.index + 1)
        engine.run()

        stock = FakeEngine(blocks=24)
        for number in range(6):
            stock.add(prompt=5 + number, max_tokens=9 + number)
        expected = stock.run()
        assert all(request.aborted or expected[request.id] == request.tokens for request in requests)
        assert (0, 0) == (engine.pool.counts.held, bridge.quota.violations)


class TestBatchWindow:
    STEP = BatchingStep(
        index=1,
        new_waiting=1,
        running=0,
        slots=8,
        waiting_tokens=5,
        budget_tokens=64,
        oldest_wait=0.0,
        arrivals_possible=True,
    )

    @pytest.mark.parametrize(
        "change",
        [
            {"new_waiting": 8},
            {"new_waiting": 9},
            {"slots": 0},
            {"waiting_tokens": 64},
            {"waiting_tokens": 65},
            {"arrivals_possible": False},
        ],
    )
    def test_it_waits_for_nobody_in_vain(self, change: dict[str, Any]) -> None:
        """Never when the batch is full, by requests or by tokens, or when nothing else can arrive."""
        plugin = prepared(BatchWindow(batch_window.Config(window=0.01)))

        assert 0.01 == plugin.plan_batching(self.STEP).hold_until
        assert plugin.plan_batching(attrs.evolve(self.STEP, **change)) is None

    def test_off_is_off(self) -> None:
        plugin = prepared(BatchWindow(batch_window.Config()))

        assert plugin.plan_batching(self.STEP) is None

    def test_prefills_are_gathered_and_decodes_go_on(self) -> None:
        """A request that arrives later is prefilled with the first; who runs emits a token at every step."""
        engine = FakeEngine()
        running = engine.add(max_tokens=20)
        bridge = attach(engine, {"plugin.batch_window": "10ms"})
        for _ in range(4):
            engine.step()
        assert 2 == bridge.holds
        first, before = engine.add(), len(running.tokens)
        engine.step()
        second = engine.add()
        for _ in range(2):
            assert not first.scheduled
            engine.step()

        assert (True, True, 1, 1) == (first.scheduled, second.scheduled, len(first.tokens), len(second.tokens))
        assert before + 3 == len(running.tokens)

    @pytest.mark.parametrize(("window", "holds"), [("4ms", 0), ("8ms", 1), ("12ms", 2), ("off", 0)])
    def test_never_beyond_the_window(self, window: str, holds: int) -> None:
        """Steps of 4 ms: the request is scheduled at the first that is not within."""
        engine = FakeEngine()
        bridge = attach(engine, {"plugin.batch_window": window})
        engine.add()
        engine.run()

        assert holds == bridge.holds

    def test_a_preempted_request_is_not_new(self) -> None:
        """It waited once; it is not held again. Case: vllm#41951, a request that loses its place."""
        engine = FakeEngine()
        bridge = attach(engine, {"plugin.batch_window": "10ms"})
        request = engine.add()
        for _ in range(4):
            engine.step()
        engine.preempt(request)
        holds = bridge.holds
        engine.step()

        assert (holds, [request]) == (bridge.holds, engine.running)
