"""The plugins in their seats: attached all or not at all, asked in order, swapped between two steps."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest

from chunkllm_bridge import (
    BatchingPlan,
    BatchingStep,
    BlocksPlan,
    BlocksStep,
    EngineInfo,
    Outcome,
    Plugin,
    PluginSpec,
    Preparation,
    Seam,
)
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.guard import MIN_CALLS
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.seating import fingerprint
from chunkllm_bridge.common.testing import CAPABILITIES, CORE_SEAMS, FakeCatalogue, FakeEngine, spec_for

Does = Callable[[Any], Any]


@attrs.frozen(kw_only=True)
class Config:
    size: int = 1
    window: float | None = attrs.field(default=None, metadata={"parameter": "plugin.batch_window"})


class Actor(Plugin):
    """Does what a test tells its class, and writes down what happens to it."""

    spec = PluginSpec(name="actor", version="1", abi=(1, 0), seams={Seam.BLOCKS, Seam.BATCHING})
    Config = Config
    events: ClassVar[list[str]]
    on: ClassVar[dict[str, Does]]  # verb -> what it does; the instance is its argument

    def _does(self, verb: str, *args: object) -> Any:
        if verb not in ("plan_blocks", "plan_batching"):
            self.events.append(f"{self.spec.name}.{verb}")
        return self.on[verb](self) if verb in self.on else None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.outcomes: list[Outcome] = []
        self.lease: Any = None
        self.state = 0
        self._does("init")

    def check(self, info: EngineInfo) -> Sequence[str]:
        return self._does("check") or ()

    def prepare(self, preparation: Preparation) -> None:
        self.lease_memory = preparation.lease_memory
        self._does("prepare")

    def plan_blocks(self, step: BlocksStep) -> BlocksPlan | None:
        return self._does("plan_blocks")  # type: ignore[no-any-return]

    def plan_batching(self, step: BatchingStep) -> BatchingPlan | None:
        return self._does("plan_batching")  # type: ignore[no-any-return]

    def settle(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._does("settle")

    def snapshot(self) -> Mapping[str, Any]:
        return {"state": self.state}

    def migrate(self, state: Mapping[str, Any]) -> None:
        self.state = state["state"]
        self._does("migrate")

    def close(self) -> None:
        self._does("close")


def actor(
    name: str, events: list[str] | None = None, /, facts: Mapping[str, Any] | None = None, **on: Does
) -> type[Actor]:
    """A plugin class of its own, with facts and deeds as told."""
    spec = attrs.evolve(Actor.spec, name=name, **(facts or {}))
    return type(name, (Actor,), {"spec": spec, "events": [] if events is None else events, "on": on})


def seat(*plugins: type[Plugin], engine: FakeEngine | None = None, **settings: Any) -> Host:
    """A host with these plugins; `mine__size` in the settings is `plugins.mine.size`."""
    engine = engine or FakeEngine()
    catalogue = FakeCatalogue(*plugins)
    values: dict[str, Any] = {f"plugins.{cls.spec.name}": {} for cls in plugins}
    values |= {key if "." in key else f"plugins.{key.replace('__', '.')}": value for key, value in settings.items()}
    return Host(spec_for(engine, values, catalogue), catalogue, engine.info, CORE_SEAMS, clock=engine.clock)


def plugin(host: Host, name: str) -> Actor:
    seated = host._seated[name].plugin
    assert isinstance(seated, Actor)
    return seated


def row(host: Host, name: str) -> dict[str, Any]:
    return next(plugin for plugin in host.report()["plugins"] if plugin["name"] == name)


def refused(*plugins: type[Plugin], **settings: Any) -> tuple[str, ...]:
    with pytest.raises(IncompatibleError) as caught:
        seat(*plugins, **settings)
    return caught.value.reasons


def evolved(host: Host, **values: Any) -> Any:
    return host.spec.evolve({key.replace("__", "."): value for key, value in values.items()}, catalogue=host.registry)


def blocks(index: int = 1) -> BlocksStep:
    return BlocksStep(index=index, total=24, held=0, available=24, running=0, waiting=0)


def batching(waited: float = 0.0) -> BatchingStep:
    return BatchingStep(
        index=1,
        new_waiting=1,
        running=0,
        slots=8,
        waiting_tokens=5,
        budget_tokens=64,
        oldest_wait=waited,
        arrivals_possible=True,
    )


def limit(number: int) -> Does:
    return lambda _: BlocksPlan(limit=number)


def hold(seconds: float) -> Does:
    return lambda _: BatchingPlan(hold_until=seconds)


def raising(error: BaseException) -> Does:
    def raises(_: object) -> Any:
        raise error

    return raises


def leasing(units: int) -> Does:
    def lease(self: Actor) -> None:
        self.lease = self.lease_memory(units)

    return lease


class TestRefusals:
    def test_every_reason_of_every_plugin_is_listed(self) -> None:
        """Mending one thing does not uncover the next. Cases: vllm-plugin-FL#125, LMCache#1589."""
        reasons = refused(
            actor("old", facts={"abi": (9, 0)}),
            actor("needy", facts={"requires": {"teleport", "kv.quota"}}),
            actor("gpu", facts={"needs_accelerator": True}),
            engine=FakeEngine(device="cpu", capabilities=CAPABILITIES - {"seam.batching"}),
            **{"plugin.disable": "none"},
        )

        text = "\n".join(reasons)
        assert "old 1: built for ABI 9.0, this bridge speaks 1.2" in text
        assert "needy: requires teleport; fake 1 offers attn.switch, batch.window" in text
        assert "gpu: needs an accelerator and there is none" in text
        assert "needy: fake 1 offers no seam batching yet" in text

    def test_an_exception_with_reasons_is_told_as_they_are(self) -> None:
        """The operator reads sentences, not a class name; without any, or with nonsense, what was raised."""

        class Refuses(Exception):
            def __init__(self, reasons: Any) -> None:
                self.reasons = reasons

        assert ("no file", "no memory") == refused(actor("a", prepare=raising(Refuses(("no file", "no memory")))))
        for nonsense in ((), 3):
            (reason,) = refused(actor("a", prepare=raising(Refuses(nonsense))))
            assert reason.startswith("preparing it raised Refuses")

    def test_every_plugin_is_checked_before_one_is_prepared(self) -> None:
        """All their own reasons together, and no heavy work for nothing."""
        events: list[str] = []
        reasons = refused(
            actor("a", events, check=lambda _: ["no a", "still no a"]),
            actor("b", events, check=raising(ValueError("b broke"))),
            actor("c", events, check=lambda _: [42]),
            actor("d", events),
        )

        expected = {"a: no a", "a: still no a", "b: its check raised ValueError: b broke", "c: 42"}
        assert expected == set(reasons)
        assert [] == [event for event in events if event.endswith("prepare")]

    def test_an_unreadable_plugin_hides_no_other_reason(self) -> None:
        """Also on a CPU, where every plugin is looked at to see whether it needs an accelerator."""
        broken, old = actor("broken"), actor("old", facts={"abi": (9, 0)})
        engine, catalogue = FakeEngine(device="cpu"), FakeCatalogue(broken, old)
        spec = spec_for(engine, {"plugins.broken": {}, "plugins.old": {}}, catalogue)
        del catalogue._facts["broken"]

        with pytest.raises(IncompatibleError) as caught:
            Host(spec, catalogue, engine.info, CORE_SEAMS)

        first, second = caught.value.reasons
        assert first.startswith("broken cannot be attached")
        assert second.startswith("old 1: built for ABI 9.0")

    def test_who_wants_a_seam_alone_is_refused_company(self) -> None:
        """Both are named, in either order. Case: NVIDIA-NeMo/RL#4155."""
        alone = actor("alone", facts={"seams": {Seam.BLOCKS}, "exclusive": True})

        (reason,) = refused(alone)
        assert ("seam blocks is claimed by alone and paged_kv, and alone wants it alone: disable all but one") == reason

    def test_a_seam_that_the_engine_has_once_takes_one(self) -> None:
        """The engine says so by a capability; all claimants are named. Case: NVIDIA-NeMo/RL#4155."""
        engine = FakeEngine(capabilities=CAPABILITIES | {"exclusive.batching"})

        reasons = refused(actor("a"), engine=engine)

        assert (
            "seam batching is claimed by a and batch_window, and fake offers it only once: disable all but one",
        ) == reasons

    def test_alone_is_alone_when_the_other_is_disabled(self) -> None:
        alone = actor("alone", facts={"seams": {Seam.BLOCKS}, "exclusive": True})

        host = seat(alone, **{"plugin.disable": ["paged_kv"]})

        assert host.seated(Seam.BLOCKS)


class TestAllOrNothing:
    @pytest.mark.parametrize("verb", ["init", "check", "prepare"])
    def test_one_that_raises_leaves_no_trace(self, verb: str) -> None:
        """Plugins that were seated before it are closed, newest first, and every lease is given back, also the one
        it took before it raised. Case: simonw/llm#1280, half-registered."""
        events: list[str] = []
        leases: list[Any] = []

        def lease(self: Actor) -> None:
            leases.append(self.lease_memory(10))

        def lease_and_raise(self: Actor) -> None:
            if verb == "prepare":
                lease(self)
            raise RuntimeError("in the middle")

        (reason,) = refused(
            actor("a", events, prepare=lease),
            actor("b", events, prepare=lease),
            actor("c", events, **{verb: lease_and_raise}),
            a__priority=90,
            b__priority=80,
        )

        assert "RuntimeError: in the middle" in reason
        closed = [event for event in events if event.endswith("close")]
        assert ["c.close", "b.close", "a.close"][verb == "init" :] == closed
        assert [True] * (3 if verb == "prepare" else 0) == [lease.closed for lease in leases]

    def test_a_plugin_whose_close_raises_stops_nobody_s(self) -> None:
        """The bridge takes its leases back, and closes the others."""
        events: list[str] = []
        host = seat(
            actor("a", events), actor("b", events, prepare=leasing(10), close=raising(ValueError())), b__priority=90
        )
        host.close()

        assert ["a.close", "b.close"] == events[-2:]
        assert 0 == host.memory.counts.held

    def test_close_twice_is_once(self) -> None:
        """And afterwards nobody is asked or has a limit."""
        events: list[str] = []
        host = seat(actor("a", events, plan_blocks=limit(3)), **{"plugin.batch_window": "10ms"})
        host.block_limit(blocks())
        host.close()
        host.close()

        assert 1 == events.count("a.close")
        assert host.block_limit(blocks()) is None
        assert 0.0 == host.window
        assert not any(host.seated(seam) for seam in Seam)

    def test_nothing_is_leased_after_close(self) -> None:
        """A plugin that kept the means asks in vain: nobody would give it back."""
        host = seat(actor("a"))
        leased = plugin(host, "a")
        host.close()

        assert leased.lease_memory(10) is None
        assert 0 == host.memory.counts.held


class TestMemory:
    def test_a_lease_beyond_the_share_is_refused_to_the_plugin(self) -> None:
        """It goes without, and is seated; another's share is its own."""
        host = seat(
            actor("a", prepare=leasing(17 * 2**30)),
            actor("b", prepare=leasing(16 * 2**30)),
            **{"plugin.memory_ratio": 0.25},
        )

        assert plugin(host, "a").lease is None
        assert 16 * 2**30 == row(host, "b")["memory_bytes"] == host.memory.counts.held

    def test_one_plugin_s_share_can_differ(self) -> None:
        """`plugins.<name>.memory_ratio` beats `plugin.memory_ratio`."""
        host = seat(actor("a", prepare=leasing(20 * 2**30)), a__memory_ratio=0.5, **{"plugin.memory_ratio": 0.25})

        assert 20 * 2**30 == row(host, "a")["memory_bytes"]

    def test_short_memory_goes_to_the_higher_priority(self) -> None:
        """Under pressure plugins go without from the lowest number up, whatever their names."""
        lease = leasing(40 * 2**30)
        host = seat(actor("a", prepare=lease), actor("b", prepare=lease), b__priority=51)

        assert (None, 40 * 2**30) == (plugin(host, "a").lease, plugin(host, "b").lease.units)

    def test_what_was_given_back_is_forgotten(self) -> None:
        """A plugin may lease at every step for days."""
        host = seat(actor("mine", prepare=leasing(1)))
        for _ in range(1000):
            plugin(host, "mine").lease_memory(3).close()

        assert 2 >= len(host._seated["mine"].leases)
        assert 1 == row(host, "mine")["memory_bytes"] == host.memory.counts.held

    def test_threads_of_a_plugin_leak_nothing(self) -> None:
        """They go on leasing while their generation is closed."""
        host = seat(actor("mine"))
        lease_memory = plugin(host, "mine").lease_memory
        threads = [threading.Thread(target=lambda: [lease_memory(1) for _ in range(300)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        host.close()
        for thread in threads:
            thread.join()

        assert 0 == host.memory.counts.held


class TestLookups:
    """Finding a verb can be plugin code too, and so can comparing two configs."""

    def test_a_verb_that_cannot_be_looked_up_is_a_reason(self) -> None:
        broken = actor("mine")
        broken.plan_blocks = property(lambda self: 1 / 0)  # type: ignore[method-assign, assignment]

        (reason,) = refused(broken)
        assert "mine: its constructor raised ZeroDivisionError: division by zero" == reason

    @pytest.mark.parametrize("verb", ["settle", "plan_blocks", "plan_batching", "close", "snapshot"])
    def test_a_verb_that_is_lost_later_costs_nothing(self, verb: str) -> None:
        """A step asks what was found at start; whatever else is looked up, is so under guard."""
        mine = actor("mine", plan_blocks=limit(5))
        host = seat(mine)
        setattr(mine, verb, property(lambda self: 1 / 0))

        assert 5 == host.block_limit(blocks())
        host.settle(Seam.BLOCKS, Outcome(seam=Seam.BLOCKS, step=1, applied=True))
        assert not host.hold(batching())
        host.close()
        assert 0 == host.memory.counts.held

    def test_configs_that_cannot_be_compared_are_different(self) -> None:
        """A change that has nothing to do with them is not refused for it."""

        @attrs.frozen(kw_only=True, eq=False)
        class Odd:
            size: int = 1

            def __ne__(self, other: object) -> bool:
                raise RuntimeError("no")

        mine = actor("mine")
        mine.Config = Odd
        host = seat(mine)
        host.commit(host.prepare(evolved(host, plugin__priority=7)))

        assert (2, 7) == (row(host, "mine")["generation"], row(host, "mine")["priority"])


class TestDisabling:
    GPU = staticmethod(lambda: actor("gpu", facts={"needs_accelerator": True}))

    @pytest.mark.parametrize(
        ("device", "off", "seated"),
        [
            ("fake", "none", {"cpu", "gpu", "paged_kv", "batch_window"}),
            ("fake", "all", {"cpu", "paged_kv", "batch_window"}),
            ("fake", "everything", set()),
            ("fake", ["gpu"], {"cpu", "paged_kv", "batch_window"}),
            ("fake", ["cpu", "paged_kv"], {"gpu", "batch_window"}),
            ("cpu", "all", {"cpu", "paged_kv", "batch_window"}),
            ("cpu", "everything", set()),
        ],
    )
    def test_matrix(self, device: str, off: str | list[str], seated: set[str]) -> None:
        """`all` turns off what needs an accelerator, `everything` all, names the named; each is reported with the
        reason. Case: vllm-ascend#4351, a switch tested both ways."""
        host = seat(actor("cpu"), self.GPU(), engine=FakeEngine(device=device), **{"plugin.disable": off})
        rows = host.report()["plugins"]

        assert seated == {row["name"] for row in rows if row["state"] == "seated"}
        disabled = [row for row in rows if row["state"] == "disabled"]
        assert {"cpu", "gpu", "paged_kv", "batch_window"} - seated == {row["name"] for row in disabled}
        assert all(row["last_failure"].startswith("plugin.disable") for row in disabled)

    def test_a_cpu_turns_accelerator_plugins_off_by_itself(self) -> None:
        """The profile does, and the report says why."""
        host = seat(self.GPU(), engine=FakeEngine(device="cpu"))

        assert "plugin.disable = all: it needs an accelerator and there is none" == row(host, "gpu")["last_failure"]

    def test_a_disabled_plugin_need_not_be_readable(self) -> None:
        """Switching a broken plugin off is the way out of it."""
        engine, catalogue = FakeEngine(), FakeCatalogue(actor("broken"))
        spec = spec_for(engine, {"plugins.broken": {}, "plugin.disable": ["broken"]}, catalogue)
        del catalogue._facts["broken"]

        host = Host(spec, catalogue, engine.info, CORE_SEAMS)

        assert ("disabled", "unreadable") == (row(host, "broken")["state"], row(host, "broken")["version"])


class TestOrder:
    def test_higher_first_ties_by_name(self) -> None:
        """Whatever the order they were named in. Cases: unified-cache-management#433, verl#7837."""
        asked: list[str] = []

        def asks(self: Actor) -> None:
            asked.append(self.spec.name)

        for names in (("a", "b", "c"), ("c", "b", "a")):
            asked.clear()
            host = seat(*[actor(name, plan_blocks=asks) for name in names], c__priority=99)
            host.block_limit(blocks())

            assert ["c", "a", "b"] == asked

    def test_priorities_change_while_serving(self) -> None:
        """Without a new generation: nothing of the plugin changed."""
        asked: list[str] = []
        host = seat(*[actor(n, plan_blocks=lambda self: asked.append(self.spec.name)) for n in ("a", "b")])
        host.commit(host.prepare(evolved(host, plugins__b__priority=60)))
        host.block_limit(blocks())

        assert ["b", "a"] == asked
        assert (60, 1) == (row(host, "b")["priority"], row(host, "b")["generation"])

    def test_a_spent_budget_skips_the_lowest(self) -> None:
        """Who is not asked is counted, and keeps the limit it last set."""
        engine = FakeEngine()
        slow = [False]
        host = seat(
            actor("slow", plan_blocks=lambda _: engine.clock.advance(0.011 * slow[0])),
            actor("low", plan_blocks=limit(7)),
            engine=engine,
            slow__priority=90,
            low__priority=10,
        )
        assert 7 == host.block_limit(blocks())
        slow[0] = True

        assert 7 == host.block_limit(blocks())
        assert {"slow": 0, "low": 1, "paged_kv": 1} == {
            name: row(host, name)["skipped"] for name in ("slow", "low", "paged_kv")
        }


class TestBlocks:
    def test_the_tightest_limit_holds(self) -> None:
        host = seat(actor("a", plan_blocks=limit(9)), actor("b", plan_blocks=limit(5)), actor("c"))

        assert 5 == host.block_limit(blocks())

    def test_no_plan_no_limit(self) -> None:
        """A plugin lifts its own limit by planning nothing; nobody else's."""
        plans = [BlocksPlan(limit=5), None]
        host = seat(actor("a", plan_blocks=lambda _: plans.pop(0)), actor("b", plan_blocks=limit(9)))

        assert [5, 9] == [host.block_limit(blocks()), host.block_limit(blocks())]

    @pytest.mark.parametrize("bad", [raising(ValueError()), raising(SystemExit(1)), lambda _: 3])
    def test_a_failed_call_leaves_the_last_limit_standing(self, bad: Does) -> None:
        """A quota that fails open is none."""
        deeds = [limit(5), bad, limit(6)]
        host = seat(actor("a", plan_blocks=lambda self: deeds.pop(0)(self)))

        assert [5, 5, 6] == [host.block_limit(blocks()) for _ in range(3)]

    def test_a_late_plan_leaves_the_last_limit_standing(self) -> None:
        """Late is failed."""
        engine = FakeEngine()
        deeds = [lambda: BlocksPlan(limit=5), lambda: engine.clock.advance(0.006) or BlocksPlan(limit=1)]
        host = seat(actor("a", plan_blocks=lambda _: deeds.pop(0)()), engine=engine)

        assert [5, 5] == [host.block_limit(blocks()), host.block_limit(blocks())]
        assert {"deadline": 1} == row(host, "a")["failures"]

    def test_a_tripped_plugin_s_limit_falls_away(self) -> None:
        """In the very step in which it trips: the engine is as it would be without it, and says so."""
        deeds = [limit(5), *[raising(ValueError())] * MIN_CALLS]
        host = seat(actor("a", plan_blocks=lambda self: deeds.pop(0)(self)), actor("b", plan_blocks=limit(9)))
        answers = [host.block_limit(blocks()) for _ in range(MIN_CALLS + 1)]

        assert [5] * (MIN_CALLS - 1) + [9, 9] == answers
        assert "tripped" == row(host, "a")["state"]


class TestBatching:
    def asks(self, waited: float, *plugins: type[Plugin], **settings: Any) -> bool:
        return seat(*plugins, **settings).hold(batching(waited))

    def test_the_longest_hold_counts(self) -> None:
        a, b = actor("a", plan_batching=hold(0.002)), actor("b", plan_batching=hold(0.008))
        window = {"plugin.batch_window": "10ms", "plugin.disable": ["batch_window"]}

        assert [True, False] == [self.asks(waited, a, b, **window) for waited in (0.007, 0.008)]

    def test_no_hold_passes_the_window(self) -> None:
        """Whatever a plugin asks for."""
        long = actor("long", plan_batching=hold(30))
        window = {"plugin.batch_window": "10ms"}

        assert [True, False] == [self.asks(waited, long, **window) for waited in (0.0099, 0.010)]

    def test_without_a_window_nobody_holds(self) -> None:
        long = actor("long", plan_batching=hold(30))

        assert not self.asks(0.0, long)
        assert 0.0 == seat(long).window

    def test_each_plugin_has_its_own_window(self) -> None:
        """`plugins.<name>.batch_window` bounds that plugin; the longest is what the adapter must ask within."""
        wide, narrow = actor("wide", plan_batching=hold(30)), actor("narrow", plan_batching=hold(30))
        windows = {"wide__batch_window": "12ms", "plugin.batch_window": "4ms"}

        assert [True, False] == [self.asks(waited, wide, narrow, **windows) for waited in (0.011, 0.012)]
        assert [True, False] == [
            self.asks(waited, narrow, **{"plugin.batch_window": "4ms"}) for waited in (0.003, 0.004)
        ]
        assert 0.012 == seat(wide, narrow, **windows).window

    def test_a_failed_call_holds_nobody(self) -> None:
        """A request must not pay for it."""
        assert not self.asks(
            0.0,
            actor("a", plan_batching=raising(ValueError())),
            **{"plugin.batch_window": "10ms", "plugin.disable": ["batch_window"]},
        )

    def test_each_hears_what_came_of_its_own_hold(self) -> None:
        """Whose hold keeps the requests waiting, whose is over, and who asked for none."""
        host = seat(
            actor("a", plan_batching=lambda self: BatchingPlan(hold_until=0.006)),
            actor("b", plan_batching=lambda self: BatchingPlan(hold_until=0.002)),
            actor("c"),
            **{"plugin.batch_window": "10ms", "plugin.disable": ["batch_window"]},
        )
        assert host.hold(batching(0.004))

        heard = [plugin(host, name).outcomes[-1] for name in "abc"]
        assert ["", "its hold of 2 ms is over", "it asked for no hold"] == [outcome.reason for outcome in heard]
        assert [(True, 0.004), (False, 0.004), (False, 0.004)] == [(o.applied, o.waited) for o in heard]


class TestSettling:
    def test_each_hears_whether_its_limit_was_the_one(self) -> None:
        """The tightest was applied; the others hear by which number they were beaten."""
        host = seat(
            actor("a", plan_blocks=lambda self: BlocksPlan(limit=5)),
            actor("b", plan_blocks=lambda self: BlocksPlan(limit=9)),
            actor("c"),
        )
        host.block_limit(blocks())
        host.settle_limit(3, held=4)

        heard = {name: plugin(host, name).outcomes[-1] for name in "abc"}
        assert {"a": "", "b": "a tighter limit held: 5", "c": "it set no limit"} == {
            name: outcome.reason for name, outcome in heard.items()
        }
        assert [True, False, False] == [outcome.applied for outcome in heard.values()]
        assert [(3, 4)] * 3 == [(outcome.step, outcome.held) for outcome in heard.values()]

    def test_an_overdraft_is_not_applied(self) -> None:
        """A request that was alone went beyond the limit: the plugin hears it."""
        host = seat(actor("a", plan_blocks=lambda self: BlocksPlan(limit=5)))
        host.block_limit(blocks())
        host.settle_limit(1, held=6)

        (outcome,) = plugin(host, "a").outcomes
        assert (False, "a request that was alone went beyond the limit") == (outcome.applied, outcome.reason)

    OUTCOME = Outcome(seam=Seam.BLOCKS, step=1, applied=False, reason="short")

    def test_a_settle_that_raises_or_is_late_costs_that_call(self) -> None:
        """The others hear it all the same."""
        engine = FakeEngine()
        host = seat(
            actor("a", settle=raising(ValueError())),
            actor("b", settle=lambda _: engine.clock.advance(1)),
            actor("c"),
            engine=engine,
        )
        host.settle(Seam.BLOCKS, self.OUTCOME)

        assert [self.OUTCOME] == plugin(host, "c").outcomes
        assert [{"exception": 1}, {"deadline": 1}, {}] == [row(host, name)["failures"] for name in "abc"]

    def test_a_tripped_plugin_is_told_nothing(self) -> None:
        """Its code does not run any more."""
        host = seat(actor("a", settle=raising(ValueError())))
        for _ in range(MIN_CALLS + 5):
            host.settle(Seam.BLOCKS, self.OUTCOME)

        assert MIN_CALLS == len(plugin(host, "a").outcomes)


class TestGenerations:
    def test_a_swap_happens_at_the_commit(self) -> None:
        """Until then the old one answers; the new one is ready beside it, with the state of the old."""
        events: list[str] = []
        host = seat(actor("a", events, plan_blocks=lambda self: BlocksPlan(limit=self.config.size)), a__size=5)
        old = plugin(host, "a")
        old.state = 42

        pending = host.prepare(evolved(host, plugins__a__size=7))
        before = host.block_limit(blocks())
        host.commit(pending)

        assert (5, 7) == (before, host.block_limit(blocks()))
        assert 42 == plugin(host, "a").state
        assert plugin(host, "a") is not old
        assert (2, 2) == (host.generation, row(host, "a")["generation"])
        assert ["a.init", "a.check", "a.prepare", "a.init", "a.check", "a.prepare", "a.migrate", "a.close"] == events

    def test_what_did_not_change_stays(self) -> None:
        """A change of one plugin's config is none of another's business."""
        host = seat(actor("a"), actor("b"))
        other = plugin(host, "b")
        host.commit(host.prepare(evolved(host, plugins__a__size=7)))

        assert plugin(host, "b") is other
        assert [2, 1] == [row(host, name)["generation"] for name in "ab"]

    def test_a_parameter_that_is_bound_is_config(self) -> None:
        """Its change makes a new generation with the new value."""
        host = seat(actor("a"), **{"plugin.batch_window": "10ms"})
        host.commit(host.prepare(evolved(host, plugin__batch_window="12ms")))

        assert 0.012 == plugin(host, "a").config.window == host.window

    def test_leases_move_with_the_generation(self) -> None:
        """The leaving one's are given back, the new one's stand."""
        host = seat(actor("a", prepare=lambda self: leasing(self.config.size)(self)), a__size=5)
        host.commit(host.prepare(evolved(host, plugins__a__size=7)))

        assert 7 == host.memory.counts.held == row(host, "a")["memory_bytes"]
        host.memory.check()

    @pytest.mark.parametrize("verb", ["init", "check", "prepare", "migrate"])
    def test_a_version_that_refuses_leaves_the_old_one_running(self, verb: str) -> None:
        """With its limit, its config and its leases; what the new one took is given back."""

        def deed(self: Actor) -> Any:
            if self.config.size == 7:
                raise RuntimeError("not like this")

        on: dict[str, Does] = {"prepare": leasing(10), "plan_blocks": lambda self: BlocksPlan(limit=self.config.size)}
        if verb == "prepare":
            on["prepare"] = lambda self: (leasing(10)(self), deed(self))
        else:
            on[verb] = deed
        host = seat(actor("a", **on), a__size=5)
        old = plugin(host, "a")

        with pytest.raises(IncompatibleError, match="not like this"):
            host.prepare(evolved(host, plugins__a__size=7))

        assert plugin(host, "a") is old
        assert (5, 1, 10) == (host.block_limit(blocks()), host.generation, host.memory.counts.held)

    def test_a_change_that_is_abandoned_never_was(self) -> None:
        """Another rank refused: what was prepared here is closed and gives back."""
        events: list[str] = []
        host = seat(actor("a", events, prepare=leasing(10)))
        host.abandon(host.prepare(evolved(host, plugins__a__size=7)))

        assert 10 == host.memory.counts.held
        assert (1, 1) == (host.generation, plugin(host, "a").config.size)
        assert "a.close" == events[-1]

    def test_a_config_that_refuses_a_parameter_is_a_reason(self) -> None:
        """Its validators are the author's code: what they raise is a refusal, not a crash."""

        def even(_: object, __: object, value: float | None) -> None:
            if value is not None and value > 0.011:
                raise ValueError("too long for me")

        @attrs.frozen(kw_only=True)
        class Picky:
            window: float | None = attrs.field(metadata={"parameter": "plugin.batch_window"}, validator=even)

        cls = actor("picky")
        cls.Config = Picky
        host = seat(cls, **{"plugin.batch_window": "10ms"})

        assert 0.010 == plugin(host, "picky").config.window
        with pytest.raises(IncompatibleError, match="too long for me"):
            host.prepare(evolved(host, plugin__batch_window="12ms"))


class TestReports:
    def test_loaded_is_not_active(self) -> None:
        """Active is who was called on the step path. Case: embedl/flash-head PR#2, registered but inert."""
        host = seat(actor("a"))
        states = [row(host, "a")["state"]]
        host.block_limit(blocks())

        assert ["seated", "active"] == [*states, row(host, "a")["state"]]
        assert {"init": 1, "check": 1, "prepare": 1, "plan_blocks": 1} == row(host, "a")["calls"]

    def test_a_plugin_with_no_seam_here_has_no_seat_here(self) -> None:
        """A worker's plugins sit in the workers."""
        host = seat(actor("drafter", facts={"seams": {Seam.DRAFTS}}))

        assert {"paged_kv", "batch_window"} == {plugin["name"] for plugin in host.report()["plugins"]}

    def test_fingerprints_tell_processes_apart(self) -> None:
        """Another version, another config or a missing plugin is another fingerprint. Case: vllm#18326."""
        prints = [
            seat(actor("a")).fingerprint(),
            seat(actor("a")).fingerprint(),
            seat(actor("a", facts={"version": "2"})).fingerprint(),
            seat(actor("a"), a__size=2).fingerprint(),
            seat().fingerprint(),
        ]

        assert prints[0] == prints[1]
        assert 4 == len(set(prints))

    def test_fingerprints_agree_over_processes(self) -> None:
        """A process that is spawned hashes sets in another order. Case: vllm#18326."""
        script = (
            "from chunkllm_bridge.common.seating import fingerprint\n"
            "from chunkllm_bridge.common.testing import FakeCatalogue, FakeEngine, spec_for\n"
            "catalogue = FakeCatalogue()\n"
            "values = {'plugin.disable': ['paged_kv', 'batch_window'], 'kv_cache.memory_ratio': 0.25}\n"
            "print(fingerprint(spec_for(FakeEngine(), values, catalogue), catalogue))"
        )
        catalogue = FakeCatalogue()
        values = {"plugin.disable": ["paged_kv", "batch_window"], "kv_cache.memory_ratio": 0.25}
        here = fingerprint(spec_for(FakeEngine(), values, catalogue), catalogue)

        there = [
            subprocess.run(
                [sys.executable, "-c", script],
                capture_output=True,
                text=True,
                check=True,
                env={"PYTHONHASHSEED": seed},
            ).stdout.strip()
            for seed in ("1", "2")
        ]

        assert [here, here] == there
