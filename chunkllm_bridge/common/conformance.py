"""What any plugin must keep, as named checks that run without an engine and without a device.

@pytest.mark.parametrize("check", conformance.checks(MyPlugin, config={"size": 4}), ids=str)
def test_my_plugin(check): check()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from chunkllm_bridge.common.abi import (
    PLAN_TYPES,
    DraftsPlan,
    DraftsStep,
    Memory,
    Outcome,
    Plan,
    Plugin,
    Preparation,
    Seam,
    Step,
)
from chunkllm_bridge.common.facts import read_facts
from chunkllm_bridge.common.fake import VOCAB
from chunkllm_bridge.common.fake_model import fake_model
from chunkllm_bridge.common.fake_steps import ODD_STEPS
from chunkllm_bridge.common.fitting import Misfit, fit
from chunkllm_bridge.common.generations import VERBS
from chunkllm_bridge.common.quota import Ledger
from chunkllm_bridge.common.seating import config_for
from chunkllm_bridge.common.testing import (
    FakeBridge,
    FakeCatalogue,
    FakeEngine,
    attach,
    entry_point,
    launched,
    spec_for,
)


class NotConforming(AssertionError):
    """What was promised and what came."""


@attrs.frozen(kw_only=True)
class Subject:
    """A plugin to be checked, with the settings that bring it to life."""

    plugin: type[Plugin]
    config: Mapping[str, Any] = attrs.field(factory=dict)  # its own keys
    settings: Mapping[str, Any] = attrs.field(factory=dict)  # the spec's, e.g. {"plugin.batch_window": "10ms"}

    @property
    def values(self) -> dict[str, Any]:
        table = f"plugins.{self.plugin.spec.name}"
        own = {f"{table}.{key}": value for key, value in self.config.items()}
        drafts = {"speculative.plugin": self.plugin.spec.name} if Seam.DRAFTS in self.plugin.spec.seams else {}
        return {f"{table}.priority": 50, **own, **drafts, **self.settings}

    def attach(self, engine: FakeEngine) -> FakeBridge:
        return attach(engine, self.values, self.plugin)

    def prepared(self, memory: Ledger | None = None) -> Plugin:
        """An instance as the host makes it, without a guard around it: what it raises is seen."""
        engine, catalogue = FakeEngine(), FakeCatalogue(self.plugin)
        spec, name = spec_for(engine, self.values, catalogue), self.plugin.spec.name
        plugin = self.plugin(config_for(spec, catalogue, name))
        ledger = memory or Ledger(engine.info.device_memory, name="plugin memory")

        def lease_memory(nbytes: int) -> Memory | None:
            return ledger.lease(name, nbytes)

        info = launched(engine.info, spec, catalogue)
        _expect([], [*plugin.check(info)], "reasons against an engine that has everything")
        model = fake_model()
        plugin.prepare(Preparation(info=info, generation=1, lease_memory=lease_memory, model=model))
        return plugin


@attrs.frozen
class Check:
    """One promise of one plugin. Call it: it raises `NotConforming`, or what the plugin raised."""

    promise: Callable[[Subject], None]
    subject: Subject

    def __call__(self) -> None:
        self.promise(self.subject)

    def __str__(self) -> str:
        return self.promise.__name__


def checks(
    plugin: type[Plugin], *, config: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> list[Check]:
    """Every check, for this plugin under its config and other settings of the spec."""
    subject = Subject(plugin=plugin, config=config or {}, settings=settings or {})
    return [Check(promise, subject) for promise in CHECKS]


# ---- facts ---------------------------------------------------------------------------------------------------------


def facts_are_readable_without_running(subject: Subject) -> None:
    """What stands in the source text is what the class says."""
    spec = subject.plugin.spec
    _expect(spec, read_facts(spec.name, entry_point(subject.plugin).value), "facts in the source text")


def abi_is_spoken(subject: Subject) -> None:
    _expect([], subject.plugin.spec.incompatibilities(), "reasons against this ABI")


def every_seam_has_its_verb(subject: Subject) -> None:
    """Each seam that is named is planned for, and no other: an unnamed one would never be asked."""
    written = {seam for seam, verb in VERBS.items() if getattr(subject.plugin, verb) is not getattr(Plugin, verb)}
    _expect(subject.plugin.spec.seams, frozenset(written), "seams planned for")


# ---- one instance --------------------------------------------------------------------------------------------------


def checking_has_no_effects(subject: Subject) -> None:
    plugin, info = subject.prepared(), FakeEngine().info
    before = _state(plugin)
    reasons = [*plugin.check(info)]
    _expect(reasons, [*plugin.check(info)], "reasons when asked again")
    _expect(before, _state(plugin), "state after check()")


def planning_is_pure(subject: Subject) -> None:
    """The same step gives the same plan, and no plan changes the state worth carrying."""
    plugin = subject.prepared()
    before = repr(plugin.snapshot())
    for seam, step in _steps(plugin):
        _expect(repr(_plan(plugin, seam, step)), repr(_plan(plugin, seam, step)), f"the second plan for {step}")
    _expect(before, repr(plugin.snapshot()), "snapshot() after planning")


def plans_fit_their_seam(subject: Subject) -> None:
    """Also for no request at all, a full pool, a pool of one block."""
    _expect_fitting_plans(subject.prepared())


def refusals_are_taken(subject: Subject) -> None:
    """A plan that was not applied, told even twice, raises nothing and spoils no later plan."""
    plugin = subject.prepared()
    for seam, step in _steps(plugin):
        index = getattr(step, "index", 0)
        refused = Outcome(seam=seam, step=index, applied=False, reason="not now", plan=_plan(plugin, seam, step))
        plugin.settle(refused)
        plugin.settle(refused)
    _expect_fitting_plans(plugin)


def state_survives_a_generation(subject: Subject) -> None:
    """The snapshot is plain data, and the next generation that takes it over has the same."""
    old = subject.prepared()
    for seam, step in _steps(old):
        old.settle(Outcome(seam=seam, step=getattr(step, "index", 0), applied=True, plan=_plan(old, seam, step)))
    state = json.loads(json.dumps(dict(old.snapshot())))
    new = subject.prepared()
    new.migrate(state)
    _expect(state, json.loads(json.dumps(dict(new.snapshot()))), "snapshot() after migrate()")


def closing_gives_everything_back(subject: Subject) -> None:
    """Twice does no harm, and the bridge takes back what the plugin left behind."""
    plugin = subject.prepared()
    plugin.close()
    plugin.close()
    engine = FakeEngine()
    bridge = subject.attach(engine)
    hosts = [bridge.host, *(desk.host for desk in bridge.workers.desks)]
    bridge.close()
    bridge.close()
    _expect([0] * len(hosts), [host.memory.counts.held for host in hosts], "bytes leased after close()")


def short_memory_is_no_failure(subject: Subject) -> None:
    """Without the memory it asks for, a plugin goes without, or says so while it prepares: `check` and `prepare` may
    refuse, plans may not."""
    empty = Ledger(0, name="no memory")
    try:
        plugin = subject.prepared(empty)
    except NotConforming:
        raise
    except Exception:
        return
    for seam, step in _steps(plugin):
        _plan(plugin, seam, step)
    plugin.close()


def drafts_fit_their_step(subject: Subject) -> None:
    """A row for each request, none longer and no tree larger than allowed, each node after its parent."""
    plugin = subject.prepared()
    for _, step in _steps(plugin):
        plan = _plan(plugin, Seam.DRAFTS, step) if isinstance(step, DraftsStep) else None
        if isinstance(step, DraftsStep) and isinstance(plan, DraftsPlan):
            drafts = fit(plan, step, VOCAB)
            _expect(
                "", drafts.reason if isinstance(drafts, Misfit) else "", f"what is wrong with the drafts for {step}"
            )


# ---- in an engine --------------------------------------------------------------------------------------------------


def tokens_are_the_engine_s_own(subject: Subject) -> None:
    """Under preemption, stolen pages, failed allocations and rolled-back steps: every token, and nothing lost."""
    stock, engine = FakeEngine(), FakeEngine(ranks=2)
    expected = _serve(stock)
    with subject.attach(engine) as bridge:
        _expect(expected, _serve(engine), "tokens by request")
        _expect((0, 0), (engine.pool.counts.held, bridge.quota.violations), "(blocks held at the end, violations)")


def drafting_goes_off_and_on(subject: Subject) -> None:
    """In the middle of a run, and with fewer tokens: every token is the engine's own, and nobody drafts while off."""
    if Seam.DRAFTS not in subject.plugin.spec.seams:
        return
    stock, engine, asked = FakeEngine(), FakeEngine(), []
    with subject.attach(engine) as bridge:
        for each in (stock, engine):
            for number in range(3):
                each.add(prompt=5 + number, max_tokens=24)
        for change in ({"tokens": 1}, {"plugin": "none"}, {"plugin": subject.plugin.spec.name}):
            for _ in range(3):
                engine.step()
            _expect("", bridge.set({f"speculative.{key}": value for key, value in change.items()})["error"], "refusal")
            asked.append(bridge.status()["speculation"]["limit"])
        _expect([1, 0, 1], asked, "draft tokens allowed")
        _expect(stock.run(), engine.run(), "tokens by request")


def every_call_succeeds_and_counts(subject: Subject) -> None:
    """Loaded is not active: each seam was asked, and nothing failed, was late or malformed."""
    engine = FakeEngine()
    with subject.attach(engine) as bridge:
        _serve(engine)
        status = bridge.status()
    rows = [*status["plugins"], *(plugin for rank in status["workers"] for plugin in rank["plugins"])]
    rows = [row for row in rows if row["name"] == subject.plugin.spec.name]
    asked = {verb for row in rows for verb in row.get("calls", {}) if verb.startswith("plan_")}
    _expect({VERBS[seam] for seam in subject.plugin.spec.seams}, asked, "verbs asked")
    _expect([{}] * len(rows), [row["failures"] for row in rows], f"failures ({rows[0]['last_failure']})")


def detaching_leaves_the_engine_untouched(subject: Subject) -> None:
    """After close() the engine runs the very functions it had before."""
    engine = FakeEngine()
    before, expected = engine.functions(), _serve(FakeEngine())
    subject.attach(engine).close()
    _expect(before, engine.functions(), "functions after close()")
    _expect(expected, _serve(engine), "tokens after close()")


CHECKS: Sequence[Callable[[Subject], None]] = (
    facts_are_readable_without_running,
    abi_is_spoken,
    every_seam_has_its_verb,
    checking_has_no_effects,
    planning_is_pure,
    plans_fit_their_seam,
    refusals_are_taken,
    state_survives_a_generation,
    closing_gives_everything_back,
    short_memory_is_no_failure,
    drafts_fit_their_step,
    tokens_are_the_engine_s_own,
    drafting_goes_off_and_on,
    every_call_succeeds_and_counts,
    detaching_leaves_the_engine_untouched,
)


# ---- means ---------------------------------------------------------------------------------------------------------


def _expect(expected: object, got: object, what: str) -> None:
    if expected != got:
        raise NotConforming(f"{what}: expected {expected!r}, got {got!r}")


def _expect_fitting_plans(plugin: Plugin) -> None:
    for seam, step in _steps(plugin):
        if (plan := _plan(plugin, seam, step)) is not None:
            _expect(PLAN_TYPES[seam], type(plan), f"the type of the plan for {step}")


def _plan(plugin: Plugin, seam: Seam, step: Step) -> Plan | None:
    plan: Plan | None = getattr(plugin, VERBS[seam])(step)
    return plan


def _state(plugin: Plugin) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(plugin).items()} | {"snapshot()": repr(plugin.snapshot())}


def _steps(plugin: Plugin) -> list[tuple[Seam, Step]]:
    return [(seam, step) for seam, steps in ODD_STEPS.items() if seam in plugin.spec.seams for step in steps()]


def _serve(engine: FakeEngine) -> dict[str, list[int]]:
    """Six requests that do not fit together, while what can go wrong goes wrong."""
    for number in range(6):
        engine.add(prompt=5 + number, max_tokens=12 + number)
    engine.faults.aborted_steps = {engine.index + 3, engine.index + 7}
    engine.faults.steal, engine.faults.fail_at_page = 3, 5
    return engine.run()
