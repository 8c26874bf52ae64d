"""The plugins in their seats in this process: install, generations, swap at a step boundary, close."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import attrs

from chunkllm_bridge.common.abi import (
    PLAN_TYPES,
    BatchingPlan,
    BatchingStep,
    BlocksPlan,
    BlocksStep,
    EngineInfo,
    Memory,
    Model,
    Outcome,
    Plan,
    Plugin,
    Preparation,
    Seam,
    Step,
)
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.generations import VERBS, Generation, Pending
from chunkllm_bridge.common.guard import Guard, Limits, told
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.quota import Ledger
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.seating import check, config_for, disabled, fingerprint, wanted
from chunkllm_bridge.common.spec import Spec

log = get_logger("host")


class Host:
    """Seats plugins, asks them in order of priority, and swaps their generations between two steps."""

    def __init__(
        self,
        spec: Spec,
        registry: Registry,
        info: EngineInfo,
        seams: frozenset[Seam],
        *,
        model: Model | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Attach everything or nothing: raises `IncompatibleError` with every reason, and leaves no trace.

        `model`: what plugins may look into, in a worker.
        """
        if reasons := check(spec, registry, info):
            raise IncompatibleError("the plugin spec", reasons)
        self.spec, self.registry, self.info = spec, registry, info
        self.limits = Limits(error_rate=spec["plugin.error_rate"])
        self.off = disabled(spec, registry, info)
        self.generation = 1
        self.memory = Ledger(info.device_memory or 1, name="plugin memory")
        self._clock, self._model = clock, model
        self._here = seams
        self._limits: dict[str, int] = {}  # BLOCKS: the limit of each plugin that set one
        self._seated: dict[str, Generation] = {}
        names = [n for n in wanted(spec) if n not in self.off and registry.facts(n).seams & seams]
        names.sort(key=lambda name: -spec.for_plugin(name, "priority"))  # under a short quota the low ones go without
        self._seated.update(self._build(spec, names, self.generation))
        self._order()
        for name, reason in self.off.items():
            log.info("plugin.disabled", plugin=name, reason=reason)

    # ---- generations ----

    def _build(
        self, spec: Spec, names: Sequence[str], number: int, before: Mapping[str, Generation] | None = None
    ) -> dict[str, Generation]:
        """Load and check all of them, then prepare one after the other. Raises `IncompatibleError` with every reason
        that the checks give; what was taken is given back."""
        fresh: dict[str, Generation] = {}
        reasons: list[str] = []
        with contextlib.ExitStack() as undo:
            for name in names:
                try:
                    fresh[name] = self._load(spec, name, number)
                    undo.callback(fresh[name].close)
                    self._check(fresh[name])
                except IncompatibleError as error:
                    reasons += [f"{name}: {reason}" for reason in error.reasons]
            if reasons:
                raise IncompatibleError("the plugin spec", reasons)
            for name, generation in fresh.items():
                self._prepare(spec, generation, (before or {}).get(name))
            undo.pop_all()
        return fresh

    def _load(self, spec: Spec, name: str, number: int) -> Generation:
        cls, facts = self.registry.load(name), self.registry.facts(name)
        config = config_for(spec, self.registry, name)
        guard = Guard(
            name,
            attrs.evolve(self.limits, error_rate=spec.for_plugin(name, "error_rate")),
            clock=self._clock,
            on_trip=lambda reason: self._forget_limit(name),
        )

        def make() -> Generation:
            plugin = cls(config)
            return Generation(  # its verbs are looked up here and now: a lookup is plugin code too
                number=number,
                facts=facts,
                plugin=plugin,
                config=config,
                guard=guard,
                priority=spec.for_plugin(name, "priority"),
                verbs={seam: getattr(plugin, VERBS[seam]) for seam in facts.seams & self._here},
                settle=None if type(plugin).settle is Plugin.settle else plugin.settle,
            )

        generation, error = guard.call("init", make, None)
        if generation is None:
            why = "made nothing" if error is None else f"raised {told(error)}"
            raise IncompatibleError(name, [f"its constructor {why}"]) from error
        return generation

    def _check(self, generation: Generation) -> None:
        plugin, guard = generation.plugin, generation.guard
        none: list[str] = []
        reasons, error = guard.call("check", lambda: [str(reason) for reason in plugin.check(self.info)], none)
        if error is not None:
            raise IncompatibleError(generation.name, [f"its check raised {told(error)}"]) from error
        if reasons:
            raise IncompatibleError(generation.name, reasons)

    def _prepare(self, spec: Spec, generation: Generation, before: Generation | None) -> None:
        name, plugin, guard = generation.name, generation.plugin, generation.guard
        share = spec.for_plugin(name, "memory_ratio")
        self.memory.set_limit(None if share is None else int(share * self.info.device_memory), owner=name)

        def lease_memory(nbytes: int) -> Memory | None:
            return generation.lease(self.memory, nbytes)

        preparation = Preparation(
            info=self.info, generation=generation.number, lease_memory=lease_memory, model=self._model
        )
        _, error = guard.call("prepare", lambda: plugin.prepare(preparation), None)
        if error is None and before is not None:
            nothing: Mapping[str, Any] = {}
            state, error = guard.call("snapshot", lambda: before.plugin.snapshot(), nothing)
            if error is None:
                _, error = guard.call("migrate", lambda: plugin.migrate(state), None)
        if error is not None:
            reasons = reasons_of(error) or [f"preparing it raised {told(error)}"]
            raise IncompatibleError(name, reasons) from error

    def prepare(self, spec: Spec) -> Pending:
        """Build what a changed spec asks for, beside what is seated. Heavy work; the seats do not change."""
        configs = {name: config_for(spec, self.registry, name) for name in self._seated}
        changed = [name for name, seated in self._seated.items() if differ(configs[name], seated.config)]
        return Pending(spec=spec, fresh=self._build(spec, changed, self.generation + 1, before=self._seated))

    def commit(self, pending: Pending) -> None:
        """Swap at a step boundary: pointers only. The generations that leave are closed."""
        leaving = [self._seated[name] for name in pending.fresh]
        self._seated.update(pending.fresh)
        if self.spec["speculative.plugin"] is None and pending.spec["speculative.plugin"] is not None:
            for generation in self._seats[Seam.DRAFTS]:
                generation.guard.renew()
        self.spec = pending.spec
        self.generation += 1
        for name, generation in self._seated.items():
            generation.priority = pending.spec.for_plugin(name, "priority")
            generation.guard.limits.error_rate = pending.spec.for_plugin(name, "error_rate")
        self._order()
        for generation in leaving:
            generation.close()

    def abandon(self, pending: Pending) -> None:
        for generation in pending.fresh.values():
            generation.close()

    def _order(self) -> None:
        """Higher priority first, ties by name."""
        ranked = sorted(self._seated.values(), key=lambda generation: (-generation.priority, generation.name))
        self._seats = {seam: [gen for gen in ranked if seam in gen.verbs] for seam in Seam}
        self._settlers = {
            seam: [(gen.guard, gen.settle) for gen in seats if gen.settle is not None]
            for seam, seats in self._seats.items()
        }
        self._fingerprint = fingerprint(self.spec, self.registry)  # reads every plugin's metadata: once per change
        windows = [self.spec.for_plugin(gen.name, "batch_window") or 0.0 for gen in self._seats[Seam.BATCHING]]
        self._window = max(windows, default=0.0)

    # ---- the step path ----

    def ask(self, seam: Seam, step: Step, *, in_step: bool = True) -> Iterator[tuple[Generation, Plan | None, bool]]:
        """Each seated plugin's (generation, plan, failed), highest priority first, within the step's budget."""
        verb, kind = VERBS[seam], PLAN_TYPES[seam]
        deadline, budget = self.limits.of(seam)
        started = self._clock()
        for generation in self._seats[seam]:
            guard = generation.guard
            if self._clock() - started > budget:
                guard.tally.skipped += 1
                yield generation, None, True
                continue
            generation.steps += in_step
            before = guard.tally.failures.total()
            plan = guard.plan(verb, generation.verbs[seam], step, kind, deadline)
            yield generation, plan, guard.tally.failures.total() != before

    def block_limit(self, step: BlocksStep, *, in_step: bool = True) -> int | None:
        """The tightest of the plugins' limits. A failed call leaves that plugin's last limit standing.

        Asked between two steps too (`in_step=False`), so that a change shows before the next one.
        """
        for generation, plan, failed in self.ask(Seam.BLOCKS, step, in_step=in_step):
            if isinstance(plan, BlocksPlan):
                self._limits[generation.name] = plan.limit
            elif not failed:
                self._forget_limit(generation.name)
        return min(self._limits.values(), default=None)

    def _forget_limit(self, name: str) -> None:
        self._limits.pop(name, None)

    @property
    def window(self) -> float:
        """The longest that any plugin may hold new prefills, in seconds; 0 = nobody may, so nobody is asked."""
        return self._window

    def hold(self, step: BatchingStep) -> bool:
        """Whether the new prefills wait one more step: the longest hold asked for, never beyond the batch window."""
        wishes: dict[str, float] = {}  # by plugin
        for generation, plan, _ in self.ask(Seam.BATCHING, step):
            if isinstance(plan, BatchingPlan):
                window = self.spec.for_plugin(generation.name, "batch_window") or 0.0
                wishes[generation.name] = min(plan.hold_until, window)
        for guard, settle in self._settlers[Seam.BATCHING]:
            wish, reason = wishes.get(guard.name), ""
            if wish is None:
                reason = "it asked for no hold"
            elif step.oldest_wait >= wish:
                reason = f"its hold of {wish * 1e3:g} ms is over"
            outcome = Outcome(
                seam=Seam.BATCHING, step=step.index, applied=not reason, reason=reason, waited=step.oldest_wait
            )
            guard.plan("settle", settle, outcome, NoneType)
        return step.oldest_wait < max(wishes.values(), default=0.0)

    def seated(self, seam: Seam) -> bool:
        """Whether any plugin has a seat there: an adapter builds no step for nobody."""
        return bool(self._seats[seam])

    def answering(self, seam: Seam) -> bool:
        """Whether any plugin there may still answer: one that tripped or stepped aside does not."""
        return any(not generation.guard.tripped for generation in self._seats[seam])

    def aside(self, seam: Seam) -> str:
        """Why a plugin of the seam stepped aside; "" while none did."""
        return next((gen.guard.aside for gen in self._seats[seam] if gen.guard.aside), "")

    def settle(self, seam: Seam, outcome: Outcome | Callable[[str], Outcome]) -> None:
        """Tell the seam's plugins how the step went: all the same, or each (by its name) what became of its own."""
        deadline, _ = self.limits.of(seam)
        for guard, settle in self._settlers[seam]:
            own = outcome if isinstance(outcome, Outcome) else outcome(guard.name)
            guard.plan("settle", settle, own, NoneType, deadline)

    def settle_limit(self, index: int, held: int) -> None:
        """Tell each BLOCKS plugin whether its limit was the one in force in a step, and whether it was kept."""
        if not self._settlers[Seam.BLOCKS]:
            return
        tightest = min(self._limits.values(), default=0)
        for guard, settle in self._settlers[Seam.BLOCKS]:
            own = self._limits.get(guard.name)
            if own is None:
                reason = "it set no limit"
            elif own > tightest:
                reason = f"a tighter limit held: {tightest}"
            else:
                reason = "a request that was alone went beyond the limit" if held > own else ""
            outcome = Outcome(seam=Seam.BLOCKS, step=index, applied=not reason, reason=reason, held=held)
            guard.plan("settle", settle, outcome, NoneType)

    # ---- for people ----

    def fingerprint(self) -> str:
        return self._fingerprint

    def report(self) -> dict[str, Any]:
        plugins = [self._seated[name].report() for name in sorted(self._seated)]
        plugins += [
            {"name": name, "version": self.registry.version(name), "state": "disabled", "last_failure": reason}
            for name, reason in self.off.items()
        ]
        return {
            "role": self.info.role,
            "rank": self.info.rank,
            "pid": os.getpid(),
            "fingerprint": self.fingerprint(),
            "generation": self.generation,
            "plugins": plugins,
        }

    def close(self) -> None:
        """Close every generation, newest first. Idempotent."""
        for generation in reversed(self._seated.values()):
            generation.close()
        self._seated.clear()
        self._limits.clear()
        self._order()


def reasons_of(error: BaseException) -> list[str]:
    """What an exception lists as `reasons`; empty where it has none, or none that can be read."""
    try:
        return [str(reason) for reason in getattr(error, "reasons", ())]
    except Exception:  # a plugin's own exception is plugin code
        return []


def differ(new: object, old: object) -> bool:
    """Whether a changed spec gives a plugin another config; one that cannot be compared counts as another."""
    try:
        return bool(new != old)
    except Exception:  # a Config is plugin code
        return True
