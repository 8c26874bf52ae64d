"""The batch window on vLLM's real schedulers, without a model, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engines.simulation import Clock, Simulation

WINDOW = 0.010  # seconds

both = pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def simulate(tiny_model: Path, clock: Clock) -> Callable[..., Simulation]:
    def make(**options: object) -> Simulation:
        window = (f"plugin.batch_window={WINDOW * 1e3:.0f}ms",)
        return Simulation(tiny_model, **{"sets": window, "clock": clock, "overlapped": False, **options})

    return make


def scheduled(it: Simulation) -> set[str]:
    return set(it.step().num_scheduled_tokens)


@both
def test_requests_within_the_window_are_prefilled_together(simulate, clock, overlapped):
    """The first new request waits until its window is over, and the others that came meanwhile go with it."""
    it = simulate(overlapped=overlapped)
    first = it.add(prompt=20, answer=5)
    assert set() == scheduled(it)
    clock.now += 0.6 * WINDOW
    second = it.add(prompt=20, answer=5)
    assert set() == scheduled(it)
    clock.now += 0.5 * WINDOW

    assert {first, second} == scheduled(it)
    assert 2 == it.bridge.holds
    for _ in it.drain():
        pass
    it.check_finished()


@both
def test_never_beyond_the_window(simulate, clock, overlapped):
    """However many keep coming, no request is held longer than the window, counted from its own arrival."""
    it = simulate(overlapped=overlapped)
    came: dict[str, float] = {}
    waited: dict[str, float] = {}
    for _ in range(60):
        if len(came) < 12:
            came[it.add(prompt=20, answer=5)] = clock.now
        for name in scheduled(it):
            waited.setdefault(name, clock.now - came[name])
        clock.now += 0.3 * WINDOW

    assert came.keys() == waited.keys()
    assert 0 < it.bridge.holds
    assert max(waited.values()) < 1.3 * WINDOW + 1e-6  # the window, and the rest of the step in which it ends
    it.check_finished()


@both
def test_decodes_are_never_held(simulate, clock, overlapped):
    """While a new request is held, those that run get their token in every step."""
    it = simulate(overlapped=overlapped)
    running = it.add(prompt=20, answer=40)
    clock.now += 2 * WINDOW
    assert {running} == scheduled(it)
    new = it.add(prompt=20, answer=5)

    for _ in range(8):
        clock.now += 0.1 * WINDOW
        assert {running} == scheduled(it)
    clock.now += 0.3 * WINDOW

    assert {running, new} == scheduled(it)
    assert 8 == it.bridge.holds


@both
def test_preempted_requests_are_not_held(simulate, clock, overlapped):
    """A request that ran before and waits for blocks is no new prefill: it comes back as soon as it can, ahead of the
    new ones."""
    it = simulate(overlapped=overlapped)
    names = [it.add(prompt=30, answer=30) for _ in range(3)]
    clock.now += 2 * WINDOW
    while it.held < 9:
        it.step()
    it.limit(4)
    it.step()
    assert names[1:] == [request.request_id for request in it.scheduler.waiting]
    new = it.add(prompt=30, answer=5)

    it.limit(40)

    assert set(names) == scheduled(it)
    clock.now += 2 * WINDOW
    assert {*names, new} == scheduled(it)
    for _ in it.drain():
        pass
    it.check_finished()


def test_held_requests_keep_their_order(simulate, clock):
    """Requests that were held step after step are scheduled in the order in which they came."""
    it = simulate()
    names = []
    for _ in range(4):
        names.append(it.add(prompt=20, answer=1))
        assert set() == scheduled(it)
        clock.now += 0.2 * WINDOW
    clock.now += WINDOW

    assert names == [new.req_id for new in it.step().scheduled_new_reqs]


@pytest.mark.parametrize(
    ("options", "jobs"), [({"slots": 3}, [20, 20, 20]), ({}, [300, 250])], ids=["every slot", "every token"]
)
def test_a_full_batch_goes_at_once(simulate, options, jobs):
    """What fills the batch is not held: nothing more could be prefilled with it."""
    it = simulate(**options)
    for prompt in jobs[:-1]:
        it.add(prompt=prompt, answer=5)
        assert set() == scheduled(it)
    it.add(prompt=jobs[-1], answer=5)

    assert set(it.jobs) == scheduled(it)


def test_not_where_nothing_can_arrive(simulate):
    """In-process, where requests are added between steps by the caller, holding would only waste time."""
    it = simulate(arrivals_possible=False)
    name = it.add(prompt=20, answer=5)

    assert {name} == scheduled(it)
    assert 0 == it.bridge.holds


def test_a_window_that_is_switched_off_releases_what_it_held(simulate):
    """`set plugin.batch_window=off` while a request is held: it goes with the next step."""
    it = simulate()
    name = it.add(prompt=20, answer=5)
    assert set() == scheduled(it)

    it.set(plugin__batch_window="off")

    assert {name} == scheduled(it)


def test_held_requests_count_as_waiting(simulate):
    """Between two steps a held request stands in the engine's own queue: it is seen, counted, and can be aborted."""
    it = simulate()
    name = it.add(prompt=20, answer=5)
    it.step()
    assert [name] == [request.request_id for request in it.scheduler.waiting]

    it.abort(name)

    assert set() == scheduled(it)
    it.check_finished()
