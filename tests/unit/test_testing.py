"""The fake engine and the conformance checks: they keep their own promises, and they can fail."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from chunkllm_bridge import (
    AttentionPlan,
    AttentionStep,
    BatchingPlan,
    BlocksPlan,
    BlocksStep,
    DraftsPlan,
    DraftsStep,
    EngineInfo,
    Outcome,
    Plugin,
    PluginSpec,
    Preparation,
    Seam,
    WeightsPlan,
    WeightsStep,
)
from chunkllm_bridge.common.conformance import CHECKS, NotConforming, Subject, checks
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.fake import LAYERS
from chunkllm_bridge.common.testing import CAPABILITIES, FakeEngine, attach, token_at


class Oracle(Plugin):
    """Drafts what the model will say, and one token that it will not; chooses attention and weights."""

    spec = PluginSpec(
        name="oracle", version="1", abi=(1, 0), seams={Seam.ATTENTION, Seam.DRAFTS, Seam.WEIGHTS}, optional={"tp"}
    )

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.outcomes: list[Outcome] = []

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan:
        places = [(name, int(hidden[0])) for name, hidden in zip(step.request_ids, step.hidden_states, strict=True)]
        rows = [[token_at(name, at), token_at(name, at + 1), 0][: step.max_tokens] for name, at in places]
        return DraftsPlan(tokens=step.last_tokens.new_tensor(rows).reshape(len(rows), -1 if rows else 0))

    def plan_attention(self, step: AttentionStep) -> AttentionPlan:
        return AttentionPlan(strategy="flash2")

    def plan_weights(self, step: WeightsStep) -> WeightsPlan:
        return WeightsPlan(format="fp8_e4m3")

    def settle(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Wrong(Oracle):
    """Drafts nonsense in every way, and names what no engine has."""

    spec = PluginSpec(
        name="wrong", version="1", abi=(1, 0), seams={Seam.ATTENTION, Seam.DRAFTS, Seam.WEIGHTS}, summary="never right"
    )

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan:
        number, filled = len(step.request_ids), step.last_tokens.new_full
        return (
            DraftsPlan(tokens=filled((number + 1, 1), 1)),
            DraftsPlan(tokens=filled((number, step.max_tokens + 1), 1)),
            DraftsPlan(tokens=filled((number, 1), 1), parents=(0,)),
            DraftsPlan(tokens=filled((number, 1), 1).float()),
        )[step.index % 4]

    def plan_attention(self, step: AttentionStep) -> AttentionPlan:
        return AttentionPlan(strategy="telepathy")

    def plan_weights(self, step: WeightsStep) -> WeightsPlan:
        return WeightsPlan(format="fp1")


def serve(engine: FakeEngine, number: int = 6) -> dict[str, list[int]]:
    for index in range(number):
        engine.add(prompt=5 + index, max_tokens=12)
    return engine.run()


class Anything(Oracle):
    """Drafts whatever a random number says: right, wrong, ragged, too wide, no tokens, trees, nothing; or fails."""

    spec = PluginSpec(name="anything", version="1", abi=(1, 1), seams={Seam.DRAFTS})
    numbers: ClassVar[random.Random]
    engine: ClassVar[FakeEngine]

    def draft_nodes(self, tokens: int) -> int:
        return 9

    def plan_drafts(self, step: DraftsStep) -> Any:
        numbers, rows = self.numbers, []
        match numbers.choice(["chain", "chain", "tree", "none", "raises", "late", "wide", "shape"]):
            case "none":
                return None
            case "raises":
                raise ValueError("no")
            case "wide":
                return DraftsPlan(tokens=step.last_tokens.new_full((len(step.request_ids), step.max_tokens + 1), 1))
            case "shape":
                return DraftsPlan(tokens=step.last_tokens)
            case "late":
                self.engine.clock.advance(1.0)
            case "tree":
                width = numbers.randint(1, 9)
                parents = tuple(numbers.randint(-1, at - 1) for at in range(width))
                rows = [self._row(name, hidden, width) for name, hidden in self._places(step)]
                return DraftsPlan(tokens=step.last_tokens.new_tensor(rows), parents=parents)
        rows = [self._row(name, hidden, numbers.randint(0, step.max_tokens)) for name, hidden in self._places(step)]
        rows = [row + [-1] * (step.max_tokens - len(row)) for row in rows]
        return DraftsPlan(tokens=step.last_tokens.new_tensor(rows))

    def _places(self, step: DraftsStep) -> list[tuple[str, int]]:
        return [(name, int(at[0])) for name, at in zip(step.request_ids, step.hidden_states, strict=True)]

    def _row(self, name: str, at: int, width: int) -> list[int]:
        odd = [-1, 1_000, 10**12, self.numbers.randrange(1_000)]
        right = [token_at(name, at + self.numbers.randint(0, 2)) for _ in range(width)]
        return [token if self.numbers.random() < 0.8 else self.numbers.choice(odd) for token in right]


class TestEngine:
    def test_tokens_depend_on_request_and_position_only(self) -> None:
        """Not on the batch, the pool, or what went wrong."""
        small = FakeEngine(blocks=8, max_running=2)
        small.faults.aborted_steps, small.faults.steal, small.faults.fail_at_page = {2, 4}, 2, 3

        assert serve(FakeEngine(blocks=200, max_running=99)) == serve(small)

    def test_failure_at_every_page_takes_nothing(self) -> None:
        """All pages of an allocation or none; the request waits, and the books are right. Case: kvcached#301."""
        for page in range(1, 6):
            engine = FakeEngine()
            request = engine.add(prompt=18, max_tokens=2)
            engine.faults.fail_at_page = page
            engine.step()

            assert (None, [request], 24) == (request.lease, engine.waiting, engine.pool.counts.free)
            engine.step()
            assert [request] == engine.running

    def test_failure_while_growing_leaves_what_was_held(self) -> None:
        """Whichever of the new pages it is. Case: kvcached#301."""
        for page in range(1, 5):
            engine = FakeEngine()
            request = engine.add(prompt=6, max_tokens=2)
            assert engine.allocate(request, 2)
            engine.faults.fail_at_page = page

            assert not engine.allocate(request, 6)
            assert 2 == engine.held()

    def test_pages_stolen_after_the_check_are_a_miss(self) -> None:
        """No exception, no half allocation: the request waits. Case: kvcached#262, an engine that died of it."""
        engine = FakeEngine(blocks=8)
        request = engine.add(prompt=18, max_tokens=2)
        engine.faults.steal = 4
        engine.step()

        assert (None, [request]) == (request.lease, engine.waiting)
        engine.step()
        assert [request] == engine.running

    def test_a_victim_is_not_in_the_batch(self) -> None:
        """Room is made from the back, and who was preempted is not scheduled with the rest. Case: vllm#23347,
        scheduled 2 of 1 running."""
        engine = FakeEngine(blocks=4)
        first, second = engine.add(prompt=7, max_tokens=8), engine.add(prompt=7, max_tokens=8)
        for _ in range(2):
            batch = engine.schedule()
            engine.forward(batch)

        assert ([first], [second]) == (batch, engine.waiting)
        assert 1 == second.preemptions

    def test_what_can_never_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="more than the whole pool"):
            FakeEngine(blocks=2).add(prompt=8, max_tokens=1)

    def test_an_end_that_does_not_come_is_told(self) -> None:
        engine = FakeEngine()
        engine.faults.aborted_steps = set(range(100))
        engine.add()

        with pytest.raises(AssertionError, match="no end after 50 steps: 1 running, 0 waiting"):
            engine.run(50)

    def test_it_runs_without_torch(self) -> None:
        """Tensors are plain numbers then; a plugin without tensors is tested on any machine."""
        script = (
            "import sys; sys.modules['torch'] = None\n"
            f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from test_testing import *\n"
            "with attach(FakeEngine(), {'plugins.oracle': {}}, Oracle) as bridge:  # it is not asked for drafts\n"
            "    assert serve(bridge.engine) == serve(FakeEngine())\n"
            "    print(bridge.engine.strategies['flash2'] > 0)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

        assert "True" == done.stdout.strip()


class TestBridge:
    def test_right_drafts_save_steps_and_change_no_token(self) -> None:
        """The first two of three are accepted; the third, which is wrong, is not."""
        stock, engine = FakeEngine(), FakeEngine()
        expected = serve(stock, 2)
        with attach(engine, {"speculative.plugin": "oracle"}, Oracle) as bridge:
            assert expected == serve(engine, 2)
            plugin: Any = bridge.workers.desks[0].host._seated["oracle"].plugin

        fared = [(o.drafted, o.accepted) for o in plugin.outcomes if o.seam is Seam.DRAFTS]
        assert [((0, 0), (0, 0)), ((3, 3), (2, 2))] == fared[:2]
        assert engine.index < stock.index / 2

    @pytest.mark.parametrize("seed", range(12))
    def test_whatever_is_drafted_the_tokens_are_the_engine_s(self, seed: int) -> None:
        """Chains and trees, right and wrong, ragged, out of the vocabulary, too wide, late or raised, while steps are
        rolled back and the limit moves. Cases: vllm#41758, vllm#7627, vllm#9423."""
        engine = FakeEngine(ranks=2)
        Anything.numbers, Anything.engine = random.Random(seed), engine
        engine.faults.aborted_steps = {4, 9}
        settings = {"speculative.plugin": "anything", "plugins.anything.error_rate": 1}
        with attach(engine, settings, Anything) as bridge:
            for index in range(6):
                engine.add(prompt=5 + index, max_tokens=12)
            for tokens in (2, 4, 1, 3):
                for _ in range(3):
                    engine.step()
                bridge.set({"speculative.tokens": tokens})
            served = engine.run()
            speculation = bridge.status()["speculation"]

        assert serve(FakeEngine()) == served
        assert 0 < speculation["accepted"]
        assert 0 == engine.pool.counts.held

    def test_plans_that_cannot_be_used_cost_nothing(self) -> None:
        """Wrong rows, too many tokens, a tree, an unknown strategy: each is rejected and counted."""
        engine = FakeEngine()
        with attach(engine, {"speculative.plugin": "wrong", "plugins.wrong.error_rate": 1}, Wrong) as bridge:
            assert serve(FakeEngine()) == serve(engine)
            row = bridge.status()["workers"][0]["plugins"][0]

        assert {"rejected", "malformed"} == set(row["failures"])
        assert {} == engine.strategies
        assert {} == engine.formats

    def test_the_first_that_drafts_wins_per_request(self) -> None:
        """Attention takes the first plan of a step, weights the first that takes the layer."""
        engine = FakeEngine()
        settings = {"plugins.wrong.priority": 90, "plugins.wrong.error_rate": 1, "speculative.plugin": "oracle"}
        with attach(engine, settings, Oracle, Wrong):
            assert serve(FakeEngine()) == serve(engine)
            assert dict.fromkeys(LAYERS, "fp8_e4m3") == engine.formats

        assert {"flash2"} == set(engine.strategies)

    def test_a_step_that_is_rolled_back_is_told(self) -> None:
        """`applied=False`, with the reason, on the seams that had planned for it."""
        engine = FakeEngine()
        engine.faults.aborted_steps = {3}
        with attach(engine, {"speculative.plugin": "oracle"}, Oracle) as bridge:
            serve(engine)
            plugin: Any = bridge.workers.desks[0].host._seated["oracle"].plugin

        told = [o.seam for o in plugin.outcomes if (o.applied, o.reason) == (False, "the step was rolled back")]
        assert [Seam.ATTENTION, Seam.DRAFTS] == told

    def test_close_puts_everything_back(self) -> None:
        """Functions, look-ahead and formats; twice does no harm. In the middle of a run, too."""
        engine = FakeEngine()
        before = engine.functions()
        bridge = attach(engine, {"speculative.plugin": "oracle", "kv_cache.memory_ratio": 4 / 64}, Oracle)
        assert before != engine.functions()
        engine.add(max_tokens=12)
        for _ in range(3):
            engine.step()
        bridge.close()
        bridge.close()

        assert before == engine.functions()
        assert (0, {}) == (engine.lookahead, engine.formats)
        assert {"r0": [token_at("r0", 5 + at) for at in range(12)]} == engine.run()

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_a_plugin_that_refuses_on_one_rank_leaves_no_rank_attached(self, rank: int) -> None:
        """The core and the other ranks are closed again. Case: simonw/llm#1280, over several processes."""

        class Refuses(Plugin):
            spec = PluginSpec(name="refuses", version="1", abi=(1, 0), seams={Seam.BLOCKS, Seam.DRAFTS})
            closed: ClassVar[list[tuple[str, int]]] = []

            def prepare(self, preparation: Preparation) -> None:
                self.place = (preparation.info.role, preparation.info.rank)
                if self.place == ("worker", rank):
                    raise RuntimeError("not here")

            def close(self) -> None:
                self.closed.append(self.place)

        engine = FakeEngine(ranks=3)
        before = engine.functions()
        with pytest.raises(IncompatibleError, match="not here"):
            attach(engine, {"plugins.refuses": {}}, Refuses)

        assert before == engine.functions()
        assert [*(("worker", each) for each in range(rank, -1, -1)), ("core", 0)] == Refuses.closed

    def test_an_engine_that_lacks_a_seam_refuses(self) -> None:
        """With what it has. Case: vllm-plugin-FL#125."""
        engine = FakeEngine(capabilities=CAPABILITIES - {"seam.drafts"})

        with pytest.raises(IncompatibleError, match="oracle: fake 1 offers no seam drafts yet"):
            attach(engine, {"plugins.oracle": {}}, Oracle)


# ---- the conformance checks can fail ---------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Config:
    flaw: str = ""


class Flawed(Plugin):
    """Conforming but for one flaw."""

    spec = PluginSpec(name="flawed", version="1", abi=(1, 0), seams={Seam.BLOCKS})
    Config = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.flaw = config.flaw
        self.calls = self.steps = self.closed = 0
        self.memory: Any = None

    def check(self, info: EngineInfo) -> list[str]:
        self.calls += self.flaw == "checking has effects"
        return ["no"] if self.flaw == "refuses" else []

    def prepare(self, preparation: Preparation) -> None:
        self.memory = preparation.lease_memory(1)

    def plan_blocks(self, step: BlocksStep) -> Any:
        self.calls += self.flaw in ("planning counts", "plans change")
        if self.flaw == "full pool" and not step.available:
            raise ZeroDivisionError
        if self.flaw == "spoiled by a refusal" and self.steps:
            return 3
        if self.flaw == "needs its memory":
            return BlocksPlan(limit=self.memory.units)
        if self.flaw == "another seam's plan":
            return BatchingPlan(hold_until=0)
        return BlocksPlan(limit=8 + self.calls * (self.flaw == "plans change"))

    def settle(self, outcome: Outcome) -> None:
        if self.flaw == "refused" and not outcome.applied:
            raise KeyError(outcome.reason)
        self.steps += 1

    def snapshot(self) -> Mapping[str, Any]:
        if self.flaw == "no plain data":
            return {"self": self}
        return {"steps": self.steps} | ({"calls": self.calls} if self.flaw == "planning counts" else {})

    def migrate(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"] if self.flaw != "forgetful" else 0

    def close(self) -> None:
        self.closed += 1
        if self.flaw == "closes once" and self.closed > 1:
            raise RuntimeError("closed already")


class Silent(Flawed):
    """Names a seam for which it plans nothing."""

    spec = PluginSpec(name="silent", version="1", abi=(1, 0), seams={Seam.BLOCKS, Seam.BATCHING})


class Computed(Flawed):
    spec = PluginSpec(name="computed", version=str(1 + 1), abi=(1, 0), seams={Seam.BLOCKS})


class Newer(Flawed):
    spec = PluginSpec(name="newer", version="1", abi=(1, 99), seams={Seam.BLOCKS})


def failing(plugin: type[Plugin], **config: str) -> set[str]:
    failed = set()
    for check in checks(plugin, config=config):
        try:
            check()
        except Exception:
            failed.add(str(check))
    return failed


@pytest.mark.parametrize("check", checks(Flawed), ids=str)
def test_without_a_flaw_it_conforms(check: Any) -> None:
    check()


@pytest.mark.parametrize("check", checks(Oracle), ids=str)
def test_a_plugin_of_the_worker_s_seams_conforms(check: Any) -> None:
    check()


@pytest.mark.parametrize(
    ("flaw", "check"),
    [
        ("checking has effects", "checking_has_no_effects"),
        ("planning counts", "planning_is_pure"),
        ("plans change", "planning_is_pure"),
        ("full pool", "plans_fit_their_seam"),
        ("another seam's plan", "plans_fit_their_seam"),
        ("spoiled by a refusal", "refusals_are_taken"),
        ("refused", "refusals_are_taken"),
        ("no plain data", "state_survives_a_generation"),
        ("forgetful", "state_survives_a_generation"),
        ("closes once", "closing_gives_everything_back"),
        ("needs its memory", "short_memory_is_no_failure"),
        ("another seam's plan", "every_call_succeeds_and_counts"),
        ("refuses", "detaching_leaves_the_engine_untouched"),
    ],
)
def test_a_flaw_is_found(flaw: str, check: str) -> None:
    """Each check fails for the plugin that breaks its promise."""
    assert check in failing(Flawed, flaw=flaw)


@pytest.mark.parametrize(
    ("plugin", "check"),
    [
        (Silent, "every_seam_has_its_verb"),
        (Computed, "facts_are_readable_without_running"),
        (Newer, "abi_is_spoken"),
    ],
)
def test_wrong_facts_are_found(plugin: type[Plugin], check: str) -> None:
    """Also where the plugin itself would run well."""
    assert check in failing(plugin)


def test_lost_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of losslessness compares with an engine that never saw the plugin."""

    def loses(self: FakeEngine, batch: list[Any]) -> None:
        for request in batch:
            request.tokens.append(0 if self.info.world_size > 1 else 1)

    monkeypatch.setattr(FakeEngine, "forward", loses)

    assert "tokens_are_the_engine_s_own" in failing(Flawed)


def test_every_check_has_a_name_and_a_subject() -> None:
    """For `ids=str`, and for a message that says what was expected and what came."""
    assert [promise.__name__ for promise in CHECKS] == [str(check) for check in checks(Flawed)]
    with pytest.raises(NotConforming, match="reasons against this ABI: expected"):
        CHECKS[1](Subject(plugin=Newer))
