"""The one place where plugin code is called."""

from __future__ import annotations

import logging
import signal
import sys
from types import NoneType
from typing import Any

import pytest

from chunkllm_bridge import BatchingPlan, BlocksPlan, Outcome, Seam
from chunkllm_bridge.common.guard import MIN_CALLS, WINDOW, Guard, Limits
from chunkllm_bridge.common.testing import Clock

PLAN = BlocksPlan(limit=3)


class Panic(BaseException):
    """As the extension modules of other languages raise it."""


class Called:
    """Plugin code that does as told, and guards it."""

    def __init__(self, *, error_rate: float = 0.5) -> None:
        self.clock, self.trips = Clock(), list[str]()
        self.guard = Guard("mine", Limits(error_rate=error_rate), clock=self.clock, on_trip=self.trips.append)
        self.calls = 0

    def ask(self, does: Any = PLAN, *, seconds: float = 0.0) -> Any:
        def method(step: object) -> Any:
            self.calls += 1
            self.clock.advance(seconds)
            if isinstance(does, BaseException):
                raise does
            return does

        return self.guard.plan("plan_blocks", method, object(), BlocksPlan)


@pytest.mark.parametrize("answer", [PLAN, None])
def test_an_answer_passes_through(answer: BlocksPlan | None) -> None:
    """A plan, or None for "as the engine would"."""
    called = Called()

    assert answer is called.ask(answer)
    assert {"plan_blocks": 1} == called.guard.tally.calls
    assert {} == called.guard.tally.failures


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("bye"), SystemExit(0), Panic("poisoned lock")])
def test_whatever_a_plugin_raises_costs_that_call_only(error: BaseException) -> None:
    """None is answered, and the failure is counted with its words."""
    called = Called()

    assert called.ask(error) is None
    assert {"exception": 1} == called.guard.tally.failures
    assert f"plan_blocks: {type(error).__name__}: {error}" == called.guard.tally.last_failure
    assert PLAN is called.ask()


class Shutdown:
    """A signal handler as engines install it: a method that raises."""

    def handle(self, number: int, frame: object) -> None:
        raise SystemExit


@pytest.mark.parametrize(
    ("number", "handler", "kind"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, Shutdown().handle, SystemExit),
        (signal.SIGTERM, lambda number, frame: sys.exit(), SystemExit),
    ],
)
def test_what_ends_the_process_is_not_the_plugin_s(number: int, handler: Any, kind: type[BaseException]) -> None:
    """Ctrl-C and an engine's signal handler reach their goal, also while plugin code runs."""
    called = Called()
    before = signal.signal(number, handler)
    try:
        with pytest.raises(kind):
            called.guard.plan("plan_blocks", lambda step: signal.raise_signal(number), object(), BlocksPlan)
        with pytest.raises(kind):
            called.guard.call("close", lambda: signal.raise_signal(number), None)
    finally:
        signal.signal(number, before)

    assert {} == called.guard.tally.failures


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), KeyboardInterrupt()])
def test_a_plugin_cannot_end_the_process(error: BaseException) -> None:
    """Its own `sys.exit()` is a failed call; so is a KeyboardInterrupt where Ctrl-C does not raise one."""
    called = Called()
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        assert called.ask(error) is None
    finally:
        signal.signal(signal.SIGINT, before)

    assert {"exception": 1} == called.guard.tally.failures


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_exception_that_cannot_be_told_is_counted() -> None:
    """The text of an exception is plugin code too."""
    called = Called()

    assert called.ask(Unspeakable()) is None
    assert {"exception": 1} == called.guard.tally.failures
    assert "plan_blocks: Unspeakable" == called.guard.tally.last_failure


class Masked:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("no class")


class Larger(BlocksPlan):
    @property
    def limit(self) -> int:  # type: ignore[override]
        raise RuntimeError("no limit")

    def __init__(self) -> None: ...


@pytest.mark.parametrize("kind", [Masked, Larger])
def test_an_answer_with_code_in_it_is_malformed(kind: type) -> None:
    """Whatever is read of a plan after the call is data of ours."""
    called = Called()

    assert called.guard.plan("plan_blocks", lambda step: kind(), object(), BlocksPlan) is None
    assert {"malformed": 1} == called.guard.tally.failures


def test_an_answer_that_is_late_is_none() -> None:
    """The time is over, and the plan with it: the deadline can be counted on."""
    called = Called()
    deadline = called.guard.limits.deadline

    assert PLAN is called.ask(seconds=deadline)
    assert called.ask(seconds=deadline * 1.01) is None
    assert {"deadline": 1} == called.guard.tally.failures
    assert "took 5.0 ms of 5.0 ms" in called.guard.tally.last_failure
    assert pytest.approx(deadline * 2.01) == called.guard.tally.seconds


def test_a_failure_s_time_counts_too() -> None:
    """What a plugin costs is what it took, whatever came of it."""
    called = Called()
    called.ask(ValueError(), seconds=0.25)

    assert pytest.approx(0.25) == called.guard.tally.seconds


@pytest.mark.parametrize("nonsense", [3, "8", object(), BatchingPlan(hold_until=0)])
def test_nonsense_is_none(nonsense: object) -> None:
    """A plan for another seam is nonsense too."""
    called = Called()

    assert called.ask(nonsense) is None
    assert {"malformed": 1} == called.guard.tally.failures


def test_too_many_failures_trip() -> None:
    """From then on the plugin is not called; whoever asked is told once, with numbers."""
    called = Called(error_rate=0.05)
    for _ in range(MIN_CALLS):
        called.ask(ValueError("no"))

    assert called.guard.tripped
    assert called.ask() is None
    assert MIN_CALLS == called.calls
    assert ["error rate 100% over the last 20 calls; last: plan_blocks: ValueError: no"] == called.trips


def test_few_calls_mean_nothing() -> None:
    """One failure in a young plugin's life is no rate."""
    called = Called(error_rate=0.05)
    for _ in range(MIN_CALLS - 1):
        called.ask(ValueError())

    assert not called.guard.tripped


@pytest.mark.parametrize(("failures", "trips"), [(10, False), (11, True)])
def test_the_rate_must_be_passed_not_reached(failures: int, trips: bool) -> None:
    """At 0.05 of 200 calls, ten may fail."""
    called = Called(error_rate=0.05)
    for _ in range(WINDOW - failures):
        called.ask()
    for _ in range(failures):
        called.ask(ValueError())

    assert trips is called.guard.tripped


def test_old_failures_are_forgotten() -> None:
    """The window slides: a bad start is not held against a plugin for ever."""
    called = Called(error_rate=0.5)
    for _ in range(MIN_CALLS // 2):
        called.ask(ValueError())
    for _ in range(WINDOW):
        called.ask()

    assert 0.0 == called.guard.tally.error_rate
    assert 10 == called.guard.tally.failures["exception"]


def test_rejected_plans_count() -> None:
    """An adapter that cannot use a plan says so here, and it can trip."""
    called = Called(error_rate=0.2)
    for _ in range(MIN_CALLS):
        called.guard.fail("rejected", "no such strategy")

    assert called.guard.tripped


def test_drafting_may_take_longer() -> None:
    """It is work on the model's device; every other seam looks at numbers."""
    limits = Limits()

    assert [(0.25, 0.25)] == [limits.of(Seam.DRAFTS)]
    assert {(0.005, 0.010)} == {limits.of(seam) for seam in Seam if seam is not Seam.DRAFTS}


def test_a_deadline_of_its_own() -> None:
    clock = Clock()
    guard = Guard("mine", Limits(), clock=clock)

    def plans(step: object) -> BlocksPlan:
        clock.advance(0.1)
        return PLAN

    assert PLAN is guard.plan("plan_drafts", plans, object(), BlocksPlan, 0.25)
    assert guard.plan("plan_blocks", plans, object(), BlocksPlan) is None


def test_stepping_aside_is_no_failure_and_can_be_renewed() -> None:
    """What it answered was well made: it is asked no more, until it gets another chance."""
    called = Called()
    called.ask(ValueError())
    called.guard.step_aside("of no use")
    assert (None, "of no use", 1) == (called.ask(), called.guard.tally.last_failure, called.calls)
    assert ["of no use"] == called.trips
    called.guard.renew()

    assert (PLAN, "", 0.0) == (called.ask(), called.guard.aside, called.guard.tally.error_rate)


def test_settle_is_on_the_step_path() -> None:
    """It has the deadline of a plan, and nothing to answer."""
    clock = Clock()
    guard = Guard("mine", Limits(), clock=clock)
    outcome = Outcome(seam=Seam.BLOCKS, step=1, applied=True)

    assert guard.plan("settle", lambda _: clock.advance(0.1), outcome, NoneType) is None
    assert {"deadline": 1} == guard.tally.failures


def test_other_verbs_take_their_time() -> None:
    """prepare may load for minutes; its error comes back to who asked."""
    clock = Clock()
    guard = Guard("mine", Limits(), clock=clock)
    error = OSError("disk")

    def fails() -> int:
        raise error

    assert (None, None) == guard.call("prepare", lambda: clock.advance(90), None)
    assert (7, error) == guard.call("check", fails, 7)
    assert {"prepare": 1, "check": 1} == guard.tally.calls
    assert 90 == guard.tally.seconds


def test_the_first_failure_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With its traceback; the rest are counted, or the log would be the failure."""
    called = Called(error_rate=1.0)
    with caplog.at_level(logging.WARNING, "chunkllm"):
        for _ in range(5):
            called.ask(ValueError("no"))
        called.ask(3)

    assert ["exception", "malformed"] == [
        kind for kind in ("exception", "malformed") if sum(f"kind='{kind}'" in r.message for r in caplog.records) == 1
    ]
    assert "Traceback" in caplog.records[0].message
