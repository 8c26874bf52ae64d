"""Quotas on vLLM's real schedulers, without a model: one batch in flight, and two as on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from chunkllm_bridge.common.passport import Passport
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.vllm.attach import GUARD, CoreAttachment
from tests.engines.simulation import Simulation, make_host, make_scheduler, some_job, vllm_config

SEEDS = range(6)

both = pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
policies = pytest.mark.parametrize("policy", ["fcfs", "priority"])


@pytest.fixture
def simulate(tiny_model: Path) -> Callable[..., Simulation]:
    return lambda **options: Simulation(tiny_model, **options)


@both
@policies
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_whatever_happens(simulate, overlapped, policy, seed):
    """Quotas and windows that change at random, aborts in every state: each request gets exactly its tokens, what is
    held stays within the quota unless one request is alone, and the pool is free in the end (vllm#46283)."""
    chance = random.Random(f"{overlapped}{policy}{seed}")
    now = [0.0]
    it = simulate(overlapped=overlapped, policy=policy, clock=lambda: now[0])
    for _ in range(6):
        it.add(**some_job(chance), priority=chance.randint(0, 3))

    for _ in it.drain():
        now[0] += 0.002
        sole = len(it.scheduler.running) <= 1
        assert sole or it.held <= it.bridge.quota.limit
        assert it.bridge.counts().conserved
        if len(it.jobs) < 20 and chance.random() < 0.06:
            it.add(**some_job(chance), priority=chance.randint(0, 3))
        if chance.random() < 0.04:
            it.limit(chance.choice([1, 3, 10, 20, 40]))
        if chance.random() < 0.03:
            it.set(plugin__batch_window=chance.choice(["off", "3ms", "12ms"]))
        if it.scheduler.requests and chance.random() < 0.02:
            it.abort(chance.choice(list(it.scheduler.requests)))

    it.check_finished()
    assert 0 == it.bridge.quota.violations
    assert 0 < it.bridge.quota.denied
    it.step()
    assert {} == it.bridge._arrived


@both
def test_a_quota_schedules_as_a_pool_of_that_size(simulate, overlapped):
    """Held to n blocks, a large pool is scheduled step by step as the stock engine schedules a pool of n blocks: no
    more preemptions, no starving, none of our own order (vllm#41951)."""
    quota = 18
    ours = simulate(overlapped=overlapped, blocks=101, prefix_cache=False)
    ours.limit(quota)
    stock = simulate(overlapped=overlapped, blocks=quota + 1, prefix_cache=False, bridged=False)
    chance = random.Random(7)
    for _ in range(10):
        job = some_job(chance)
        ours.add(**job)
        stock.add(**job)

    scheduled = [(step.num_scheduled_tokens, sorted(step.preempted_req_ids or ())) for step in stock.drain()]

    assert scheduled == [(step.num_scheduled_tokens, sorted(step.preempted_req_ids or ())) for step in ours.drain()]
    assert any(preempted for _, preempted in scheduled)
    ours.check_finished()
    assert quota >= ours.bridge.quota.peak_ever


@both
def test_below_what_is_held_requests_are_preempted_and_finish_later(simulate, overlapped):
    """A quota lowered below what is held takes the newest requests' blocks back before the next step runs."""
    it = simulate(overlapped=overlapped)
    for _ in range(8):
        it.add(prompt=30, answer=60)
    while it.held < 24:
        it.step()
    oldest = it.scheduler.running[0].request_id

    it.limit(6)
    it.step()

    assert it.held <= 6
    assert oldest == it.scheduler.running[0].request_id
    assert 0 < it.bridge.quota.preempted
    for _ in it.drain():
        assert it.held <= 6
    it.check_finished()


@both
def test_smaller_than_one_request_they_run_one_by_one(simulate, overlapped):
    """A quota that no request fits into lets one through at a time, beyond it; all of them finish."""
    it = simulate(overlapped=overlapped)
    for _ in range(4):
        it.add(prompt=40, answer=20)
    it.limit(1)

    for _ in it.drain():
        assert len(it.scheduler.running) <= 1

    it.check_finished()
    assert 0 < it.bridge.quota.overdrafts
    assert 0 == it.bridge.quota.violations


@both
def test_nobody_starves(simulate, overlapped):
    """Under a quota that fits two of ten requests, with newcomers all the time, every request finishes, the earlier
    ones first, and none is sent back more often than there are others (vllm#41951)."""
    it = simulate(overlapped=overlapped)
    it.limit(12)
    for _ in range(10):
        it.add(prompt=30, answer=50)
    done: list[str] = []

    for number, _ in enumerate(it.drain()):
        if number % 20 == 0 and len(it.jobs) < 20:
            it.add(prompt=30, answer=50)
        done += [name for name in it.jobs if name not in it.scheduler.requests and name not in done]

    it.check_finished()
    assert max(request.num_preemptions for request in it.requests.values()) <= len(it.jobs)
    place = {name: index for index, name in enumerate(it.jobs)}
    assert all(abs(place[name] - index) <= 3 for index, name in enumerate(done))


@both
def test_the_victim_was_scheduled_in_the_same_step(simulate, overlapped):
    """An unimportant request that was scheduled first and then loses its blocks to an important one is out of the
    batch: no more is scheduled than runs (vllm#23347)."""
    it = simulate(overlapped=overlapped, policy="priority")
    low = it.add(prompt=16, answer=60, priority=9)
    it.step()
    high = it.add(prompt=16, answer=60, priority=0)
    it.limit(5)
    victims = set()

    for output in it.drain():
        assert len(output.num_scheduled_tokens) <= max(1, len(it.scheduler.running))
        assert not (output.preempted_req_ids or set()) & output.num_scheduled_tokens.keys()
        victims |= output.preempted_req_ids or set()

    assert {low} == victims
    assert 0 == it.requests[high].num_preemptions
    it.check_finished()


@both
def test_the_least_important_is_preempted_first(simulate, overlapped):
    """Lowered below what is held, a quota takes from the least important under vLLM's priority policy, where a smaller
    number counts more, wherever they stand in the queue (vllm#9342)."""
    it = simulate(overlapped=overlapped, policy="priority")
    names = []
    for priority in (9, 0, 7, 1, 8):
        names.append(it.add(prompt=30, answer=60, priority=priority))
        it.step()
    assert names == [request.request_id for request in it.scheduler.running]

    it.limit(7)
    it.step()

    assert {names[1], names[3]} == {request.request_id for request in it.scheduler.running}
    for _ in it.drain():
        pass
    it.check_finished()


@both
def test_a_step_in_flight_keeps_its_blocks(simulate, overlapped):
    """Where the engine may not free what a batch in flight still writes (a KV connector), the quota waits for it to
    land; requests are not lost, and the pool is free in the end (vllm#46289)."""
    it = simulate(overlapped=overlapped)
    it.scheduler.defer_block_free = True
    it.scheduler.schedule()  # counts from here on
    chance = random.Random(3)
    for _ in range(10):
        it.add(**some_job(chance))

    for number, _ in enumerate(it.drain()):
        if number % 9 == 0:
            it.limit(chance.choice([2, 5, 12, 40]))

    it.check_finished()
    assert 0 < it.bridge.quota.preempted


@both
def test_aborted_before_it_was_scheduled(simulate, overlapped):
    """A request that is aborted while it waits leaves nothing behind: no blocks, no arrival time (vllm#44100)."""
    it = simulate(overlapped=overlapped, sets=("plugin.batch_window=12ms",), clock=lambda: 0.0)
    for _ in range(3):
        it.abort(it.add(prompt=30, answer=60))
    held_back = [it.add(prompt=30, answer=60) for _ in range(2)]
    it.step()
    for name in held_back:
        it.abort(name)

    it.step()

    assert {} == it.bridge._arrived
    it.check_finished()


@both
def test_aborted_while_running_or_preempted(simulate, overlapped):
    """Aborts give blocks back at once, also of a request that waits after it was preempted."""
    it = simulate(overlapped=overlapped)
    names = [it.add(prompt=30, answer=60) for _ in range(6)]
    while it.held < 18:
        it.step()
    it.limit(6)
    it.step()
    preempted = it.scheduler.waiting.peek_request().request_id
    running = it.scheduler.running[0].request_id

    before = it.held
    it.abort(running)
    assert it.held < before
    it.abort(preempted)

    assert {running, preempted} < set(names)
    for _ in it.drain():
        pass
    it.check_finished()


@both
def test_the_engines_own_class(tiny_model: Path, overlapped):
    """The scheduler is of the very class that the engine chose: overlap is never lost (vllm#43724)."""
    config = vllm_config(tiny_model, overlapped=overlapped)
    host = make_host(41)
    chosen = config.scheduler_config.get_scheduler_cls()
    config.scheduler_config.scheduler_cls = GUARD
    attachment = CoreAttachment(object(), Passport.issue(host.spec, Registry.installed()))

    attachment._await_scheduler(config.scheduler_config, host)
    scheduler = make_scheduler(config)

    assert (AsyncScheduler if overlapped else Scheduler) is chosen is type(scheduler)
    assert attachment.scheduler is not None
    assert scheduler is attachment.scheduler.scheduler
    attachment.close()


@both
def test_close_gives_the_functions_back(tiny_model: Path, overlapped):
    """After `close` the scheduler and its pool have exactly the functions of their own, and go on with what runs."""
    plain = Simulation(tiny_model, overlapped=overlapped, bridged=False)
    it = Simulation(tiny_model, overlapped=overlapped)
    for _ in range(4):
        it.add(prompt=30, answer=60)
    it.limit(5)
    for _ in range(20):
        it.step()

    it.bridge.close()
    it.bridge.close()

    for ours, stock in zip(parts(it), parts(plain), strict=True):
        assert vars(stock).keys() == vars(ours).keys()
        assert type(stock) is type(ours)
    for _ in it.drain():
        pass
    it.check_finished()


def parts(it: Simulation) -> tuple[object, object, object]:
    return it.scheduler, it.scheduler.kv_cache_manager, it.scheduler.kv_cache_manager.block_pool


def test_no_limit_costs_no_call(simulate):
    """Without a quota the engine's allocation is called as it is: nothing is hidden, nothing is judged."""
    it = simulate(overlapped=True)
    for _ in range(20):
        it.add(prompt=60, answer=100)

    for _ in it.drain():
        pass

    it.check_finished()
    quota = it.bridge.quota
    assert (0, 0, 0) == (quota.denied, quota.overdrafts, quota.preempted)
    assert 0 < max(request.num_preemptions for request in it.requests.values())  # the engine's own, the pool was full


def test_reset_prefix_cache_sees_the_true_pool(simulate):
    """Only allocation sees the lowered count: usage and the prefix cache's reset go by what is held (vllm#20302)."""
    it = simulate(overlapped=False)
    it.add(prompt=64, answer=4)
    for _ in it.drain():
        pass
    it.limit(2)
    counts = it.bridge.counts()

    assert (40, 0, 4) == (counts.total, counts.held, counts.cached)
    assert 40 == it.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert it.scheduler.reset_prefix_cache()
    assert 0 == it.bridge.counts().cached
