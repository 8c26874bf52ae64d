"""The only place where plugin code is called: catch, time, count, fall back, trip."""

from __future__ import annotations

import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from chunkllm_bridge.common.abi import Plan, Seam
from chunkllm_bridge.common.log import get_logger

log = get_logger("guard")

WINDOW = 200
"""Calls over which a plugin's error rate is taken."""
MIN_CALLS = 20
"""Calls before an error rate means anything."""

T = TypeVar("T")


def ends_process(error: BaseException) -> bool:
    """Whether a signal raised it while plugin code ran: Ctrl-C, or an engine's handler that shuts its process down.

    A plugin's own `sys.exit()` is none: a handler that raised stands in the traceback.
    """
    if not isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True  # that one leaves no frame
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def told(error: BaseException) -> str:
    """What it says; only its kind where even that fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # a plugin's own exception: its __str__ is plugin code too
        return type(error).__name__


@attrs.define(kw_only=True)
class Limits:
    """How long plugin code may take on the step path (seconds), and how often it may fail."""

    deadline: float = 0.005  # one call
    budget: float = 0.010  # all plugins of one step; what is left unasked is counted as skipped
    drafts: float = 0.250  # both of them at DRAFTS: drafting is real work on the model's device, not a look at numbers
    error_rate: float = 0.05

    def of(self, seam: Seam) -> tuple[float, float]:
        """(deadline, budget) at a seam."""
        return (self.drafts, self.drafts) if seam is Seam.DRAFTS else (self.deadline, self.budget)


@attrs.define(kw_only=True)
class Tally:
    """What came of the calls of one generation."""

    calls: Counter[str] = attrs.field(factory=Counter)  # verb -> calls
    failures: Counter[str] = attrs.field(factory=Counter)  # "exception" | "deadline" | "malformed" | "rejected"
    skipped: int = 0  # not asked: the step's budget was spent
    seconds: float = 0.0
    last_failure: str = ""
    recent: deque[bool] = attrs.field(factory=lambda: deque(maxlen=WINDOW))  # True = failed

    @property
    def error_rate(self) -> float:
        return sum(self.recent) / len(self.recent) if self.recent else 0.0


class Guard:
    """Calls one plugin generation. A failed call is as if the plugin had answered None."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_trip: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name = name
        self.limits = limits
        self.tally = Tally()
        self.tripped = False
        self.aside = ""  # why the plugin stepped aside, though its calls succeed
        self._clock = clock
        self._on_trip = on_trip

    def plan(
        self,
        verb: str,
        method: Callable[[Any], Plan | None],
        step: object,
        kind: type[Plan | None],
        deadline: float | None = None,  # seconds; None: that of the limits
    ) -> Plan | None:
        """Ask for a plan on the step path. None where the plugin has none, fails, is late, or answers nonsense.

        `settle` is called so too, with the kind `NoneType`.
        """
        if self.tripped:
            return None
        tally, deadline = self.tally, self.limits.deadline if deadline is None else deadline
        tally.calls[verb] += 1
        started = self._clock()
        try:
            answer = method(step)
        except BaseException as error:  # a plugin may raise anything; a request must not pay for it
            if ends_process(error):
                raise
            tally.seconds += self._clock() - started
            self.fail("exception", f"{verb}: {told(error)}", error)
            return None
        elapsed = self._clock() - started
        tally.seconds += elapsed
        if elapsed > deadline:
            self.fail("deadline", f"{verb}: took {elapsed * 1e3:.1f} ms of {deadline * 1e3:.1f} ms")
            return None
        if answer is not None and type(answer) is not kind:  # no subclass: its fields would be plugin code
            self.fail("malformed", f"{verb}: answered {type(answer).__name__}, not {kind.__name__} or None")
            return None
        tally.recent.append(False)
        return answer

    def call(self, verb: str, action: Callable[[], T], default: T) -> tuple[T, BaseException | None]:
        """Run anything else of a plugin (check, prepare, close), at whatever length. Returns (answer, error)."""
        self.tally.calls[verb] += 1
        started = self._clock()
        try:
            return action(), None
        except BaseException as error:  # as above
            if ends_process(error):
                raise
            self.fail("exception", f"{verb}: {told(error)}", error)
            return default, error
        finally:
            self.tally.seconds += self._clock() - started

    def fail(self, kind: str, reason: str, error: BaseException | None = None) -> None:
        """Count a failure; trip when there are too many. Adapters report plans they cannot use ("rejected") here."""
        tally = self.tally
        tally.failures[kind] += 1
        tally.last_failure = reason
        tally.recent.append(True)
        if tally.failures[kind] == 1:  # the first of a kind is worth a traceback, the rest are counted
            log.warning("plugin.failed", plugin=self.name, kind=kind, reason=reason, exc_info=error)
        if not self.tripped and len(tally.recent) >= MIN_CALLS and tally.error_rate > self.limits.error_rate:
            self.tripped = True
            why = f"error rate {tally.error_rate:.0%} over the last {len(tally.recent)} calls; last: {reason}"
            log.error("plugin.tripped", plugin=self.name, reason=why)
            self._on_trip(why)

    def step_aside(self, reason: str) -> None:
        """Ask it no more: what it answers is well made and of no use. The caller tells the operator."""
        self.tripped, self.aside, self.tally.last_failure = True, reason, reason
        self._on_trip(reason)

    def renew(self) -> None:
        """Another chance; what was counted stays."""
        self.tripped, self.aside = False, ""
        self.tally.recent.clear()
