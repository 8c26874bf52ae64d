"""The DRAFTS seam of a worker: whose drafts are verified, within which bounds, and what becomes of useless ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest
import torch

from chunkllm_bridge import DraftsPlan, DraftsStep, Outcome, Plugin, PluginSpec, Preparation, Seam
from chunkllm_bridge.common.acceptance import MOST_SOURCES
from chunkllm_bridge.common.drafts import TRIAL, USELESS, Drafting, check_speculation
from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.guard import MIN_CALLS
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.testing import FakeCatalogue, FakeEngine, launched, spec_for

IDS = ["a", "b", "c"]


@attrs.frozen(kw_only=True)
class Config:
    size: int = 0


class Scripted(Plugin):
    """Answers as a test tells its class, and keeps what it is told."""

    spec = PluginSpec(name="scripted", version="1", abi=(1, 2), seams={Seam.DRAFTS})
    Config = Config
    does: ClassVar[Callable[[DraftsStep], Any]]
    made: ClassVar[list[Any]]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[DraftsStep] = []
        self.outcomes: list[Outcome] = []

    def prepare(self, preparation: Preparation) -> None:
        self.preparation = preparation
        self.made.append(self)

    def plan_drafts(self, step: DraftsStep) -> Any:
        self.steps.append(step)
        return type(self).does(step)

    def settle(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def drafter(name: str, does: Any) -> type[Scripted]:
    """A class of its own that answers with these rows, or does as told."""

    def answer(step: DraftsStep) -> Any:
        return does(step) if callable(does) else None if does is None else DraftsPlan(tokens=torch.tensor(does))

    facts = attrs.evolve(Scripted.spec, name=name)
    return type(name, (Scripted,), {"spec": facts, "does": staticmethod(answer), "made": []})


def seat(*plugins: type[Scripted], engine: FakeEngine | None = None, model: Any = None, **settings: Any) -> Drafting:
    """The first is the draft source of the launch; the others are seated beside it, each with a lower priority."""
    engine, catalogue = engine or FakeEngine(), FakeCatalogue(*plugins)
    values = {f"plugins.{cls.spec.name}.priority": 90 - at for at, cls in enumerate(plugins)}
    values |= {"speculative.plugin": plugins[0].spec.name, **settings}
    spec = spec_for(engine, values, catalogue)
    info = launched(engine.info, spec, catalogue)
    host = Host(spec, catalogue, info, frozenset({Seam.DRAFTS}), model=model, clock=engine.clock)
    return Drafting(host, clock=engine.clock)


def propose(drafting: Drafting, ids: list[str] = IDS) -> list[list[int]] | None:
    drafts = drafting.propose(ids, torch.zeros(len(ids), 8), torch.arange(len(ids)))
    return None if drafts is None else drafts.tokens.tolist()


def change(drafting: Drafting, **values: Any) -> None:
    host = drafting.host
    sets = {key.replace("__", "."): value for key, value in values.items()}
    host.commit(host.prepare(host.spec.evolve(sets, catalogue=host.registry)))


def told(plugin: type[Scripted]) -> Outcome:
    last: Outcome = plugin.made[-1].outcomes[-1]
    return last


def row(drafting: Drafting, name: str) -> dict[str, Any]:
    return next(plugin for plugin in drafting.host.report()["plugins"] if plugin["name"] == name)


ROWS = [[1, 2], [3, -1], [5, 6]]


class TestAsking:
    def test_the_plugin_sees_the_step(self) -> None:
        """Hidden states and tokens as they are, and how much may be drafted."""
        one = drafter("one", ROWS)
        drafting = seat(one, **{"speculative.tokens": 3})
        hidden, last = torch.ones(3, 8), torch.tensor([7, 8, 9])
        drafting.propose(IDS, hidden, last)

        (step,) = one.made[0].steps
        assert (("a", "b", "c"), 3, 3) == (step.request_ids, step.max_tokens, step.max_nodes)
        assert (hidden is step.hidden_states, last is step.last_tokens) == (True, True)

    def test_the_plugin_sees_the_texts(self) -> None:
        """As the adapter reads them; where it reads none, nobody's is known."""
        one = drafter("one", ROWS)
        drafting = seat(one)
        texts = [[1, 2, 3], [4], [5, 6]]
        states, last = torch.zeros(3, 8), torch.tensor([3, 4, 6])
        drafting.propose(IDS, states, last, lambda place, first: texts[place][first:])
        drafting.propose(IDS, states, last)

        shown, hidden = one.made[0].steps
        assert [[2, 3], [], [6]] == [shown.context(place, 1) for place in range(3)]
        assert [None] * 3 == [hidden.context(place, 0) for place in range(3)]

    def test_ragged_drafts_come_back_in_order(self) -> None:
        assert ROWS == propose(seat(drafter("one", ROWS)))

    @pytest.mark.parametrize("does", [None, lambda step: DraftsPlan(tokens=step.last_tokens.new_zeros(3, 0))])
    def test_nobody_drafts(self, does: Any) -> None:
        """A plugin that plans nothing, or no column, has not failed."""
        drafting = seat(drafter("one", does))

        assert propose(drafting) is None
        assert {} == row(drafting, "one")["failures"]

    def test_nobody_is_asked_for_nobody(self) -> None:
        one = drafter("one", ROWS)

        assert propose(seat(one), []) is None
        assert [] == one.made[0].steps

    @pytest.mark.parametrize(
        ("does", "kind"),
        [
            ([[1], [2]], "malformed"),
            ([[1] * 5] * 3, "rejected"),
            ([[1.0]] * 3, "malformed"),
            (lambda step: 1 / 0, "exception"),
            (lambda step: "abc", "malformed"),
            (lambda step: DraftsPlan(tokens=torch.tensor(ROWS), sources=("text", "text")), "malformed"),
            (lambda step: DraftsPlan(tokens=torch.tensor(ROWS), sources=("text", "Heads", "x y")), "malformed"),
            (lambda step: DraftsPlan(tokens=torch.tensor(ROWS), sources=(1, 2, 3)), "malformed"),  # type: ignore[arg-type]
        ],
    )
    def test_what_cannot_be_used_is_counted_and_costs_nothing(self, does: Any, kind: str) -> None:
        """The engine decodes plainly, and a plugin that goes on so trips. Cases: vllm#9423, sglang#16240."""
        drafting = seat(drafter("one", does))
        assert propose(drafting) is None
        assert {kind: 1} == row(drafting, "one")["failures"]
        for _ in range(MIN_CALLS):
            propose(drafting)

        assert ("tripped", 0) == (row(drafting, "one")["state"], drafting.limit)

    @pytest.mark.parametrize(("seconds", "failures"), [(0.2, {}), (0.3, {"deadline": 1})])
    def test_drafting_has_a_deadline_of_its_own(self, seconds: float, failures: dict[str, int]) -> None:
        """It is work on the model's device: longer than at other seams, and not for ever."""
        engine = FakeEngine()

        def slow(step: DraftsStep) -> DraftsPlan:
            engine.clock.advance(seconds)
            return DraftsPlan(tokens=torch.tensor(ROWS))

        drafting = seat(drafter("one", slow), engine=engine)

        assert (not failures) == (propose(drafting) is not None)
        assert failures == row(drafting, "one")["failures"]

    def test_tokens_beyond_the_vocabulary_end_a_chain(self) -> None:
        """They would index past the embedding."""
        assert [[1, -1], [-1, -1], [5, 6]] == propose(seat(drafter("one", [[1, 1000], [-7, 3], [5, 6]])))

    def test_a_bug_of_ours_costs_the_drafts_only(self, caplog: pytest.LogCaptureFixture) -> None:
        """Told once."""
        drafting = seat(drafter("one", ROWS))
        drafting.host.ask = None  # type: ignore[method-assign,assignment]
        with caplog.at_level(logging.ERROR, "chunkllm"):
            assert [None, None] == [propose(drafting), propose(drafting)]
        drafting.verified(["a"], [1, 2], [1])

        assert 1 == caplog.text.count("drafts.failed")


class TestSeveral:
    def test_the_first_that_drafts_wins_per_request(self) -> None:
        one, two = drafter("one", [[1, 2], [-1, 9], [-1, -1]]), drafter("two", [[7, 7, 7], [8, -1, 8], [-1, 3, 3]])
        drafting = seat(one, two)

        assert [[1, 2, -1], [8, -1, -1], [-1, -1, -1]] == propose(drafting)

    def test_each_is_told_of_its_own(self) -> None:
        """The others' rows are empty, and so is the time: it is of all drafts together."""
        one, two = drafter("one", [[1, 2], [-1, 9], [5, 6]]), drafter("two", [[7, 7], [8, 8], [9, 9]])
        drafting = seat(one, two)
        propose(drafting)
        drafting.verified(IDS, [2, 2, 2], [1, 2, 0], 0.5)

        assert (True, (2, 0, 2), (1, 0, 0)) == (told(one).applied, told(one).drafted, told(one).accepted)
        assert (True, (0, 2, 0), (0, 2, 0)) == (told(two).applied, told(two).drafted, told(two).accepted)
        assert (0.0, 0.0) == (told(one).seconds, told(two).seconds)

    def test_who_had_no_draft_verified_hears_why(self) -> None:
        one, two = drafter("one", ROWS), drafter("two", [[7, 7], [8, 8], [9, 9]])
        drafting = seat(one, two)
        propose(drafting)
        drafting.verified(IDS, [2, 1, 2], [0, 0, 0], 0.5)

        assert (False, "the drafts of one were verified", 0.0) == (
            told(two).applied,
            told(two).reason,
            told(two).seconds,
        )
        assert (True, 0.5) == (told(one).applied, told(one).seconds)

    def test_a_tree_stands_alone(self) -> None:
        """With the highest priority it is taken as it is; below a chain it is not."""

        def tree(step: DraftsStep) -> DraftsPlan:
            return DraftsPlan(tokens=torch.tensor([[1, 2]] * 3), parents=(-1, -1))

        first = drafter("tree", tree)
        first.draft_nodes = lambda self, tokens: 9  # type: ignore[method-assign]
        assert [[1, 2]] * 3 == propose(seat(first, drafter("two", ROWS)))
        below = drafter("chain", [[5, 5], [-1, -1], [7, 7]])
        below.draft_nodes = lambda self, tokens: 9  # type: ignore[method-assign]
        assert [[5, 5], [-1, -1], [7, 7]] == propose(seat(below, drafter("two", tree)))


class TestVerified:
    def test_a_plain_step_is_told_with_its_time(self) -> None:
        """A plugin that drafted nothing learns how long a step without drafts takes."""
        one = drafter("one", None)
        drafting = seat(one)
        propose(drafting)
        drafting.verified(IDS, [0, 0, 0], [0, 0, 0], 0.25)

        assert (False, "it drafted nothing", (0, 0, 0), 0.25) == (
            *(told(one).applied, told(one).reason),
            *(told(one).drafted, told(one).seconds),
        )

    def test_drafts_that_the_engine_dropped(self) -> None:
        one = drafter("one", ROWS)
        drafting = seat(one)
        propose(drafting)
        drafting.verified(IDS, [0, 0, 0], [0, 0, 0])
        assert (False, "its drafts were not verified") == (told(one).applied, told(one).reason)
        propose(drafting)
        drafting.dropped("the step was rolled back")

        assert (False, "the step was rolled back") == (told(one).applied, told(one).reason)

    def test_the_batch_can_change_before_it_is_verified(self) -> None:
        """Another order, somebody gone, somebody new: numbers are by request."""
        one = drafter("one", ROWS)
        drafting = seat(one)
        propose(drafting)
        drafting.verified(["new", "c", "a"], [0, 2, 2], [0, 2, 1])

        assert ((0, 2, 2), (0, 2, 1)) == (told(one).drafted, told(one).accepted)
        assert (0.0, 3.0, 2.0) == tuple(drafting.acceptance.of(name) for name in ("new", "c", "a"))

    def test_the_report_says_it_all(self) -> None:
        drafting = seat(drafter("one", ROWS))
        propose(drafting)
        drafting.verified(IDS, [2, 1, 2], [2, 0, 1])
        drafting.finished("a")
        report = drafting.report()

        assert ("one", 4, 4, 4, 2, "") == tuple(
            report[key] for key in ("plugin", "limit", "launched", "nodes", "width", "stepped_aside")
        )
        assert (3, 5, 3, [2, 1]) == tuple(report[key] for key in ("drafts", "draft_tokens", "accepted", "accepted_at"))
        assert (2.0, 2.0) == (report["acceptance_length"], report["acceptance_length_total"])
        assert 1 == sum(count for count, _ in report["finished"])


def sourced(rows: list[list[int]], *sources: str) -> Callable[[DraftsStep], DraftsPlan]:
    return lambda step: DraftsPlan(tokens=torch.tensor(rows), sources=sources)


class TestSources:
    def test_they_are_counted_apart(self) -> None:
        """In the report by name, and for the plugin request by request; "" where no draft was verified."""
        one = drafter("one", sourced(ROWS, "text", "heads", "text"))
        drafting = seat(one)
        propose(drafting)
        drafting.verified(IDS, [2, 1, 0], [2, 0, 0])
        propose(drafting)
        drafting.verified(["c", "new", "b"], [2, 1, 1], [1, 0, 1])

        assert [("text", "heads", ""), ("text", "one", "heads")] == [told.sources for told in one.made[0].outcomes]
        assert {
            "text": {"drafts": 2, "draft_tokens": 4, "accepted": 3},
            "heads": {"drafts": 2, "draft_tokens": 2, "accepted": 1},
            "one": {"drafts": 1, "draft_tokens": 1, "accepted": 0},
        } == drafting.report()["sources"]

    def test_without_names_it_is_the_plugin_s(self) -> None:
        one = drafter("one", ROWS)
        drafting = seat(one)
        propose(drafting)
        drafting.verified(IDS, [2, 1, 2], [0, 0, 0])

        assert ("one", "one", "one") == told(one).sources
        assert {"one"} == drafting.report()["sources"].keys()

    def test_of_several_plugins(self) -> None:
        """Each request's is that of the plugin whose draft it has; the others' are none of a plugin's business."""
        one = drafter("one", sourced([[1, 2], [-1, 9], [5, 6]], "text", "heads", "heads"))
        two = drafter("two", [[7, 7], [8, 8], [9, 9]])
        drafting = seat(one, two)
        propose(drafting)
        drafting.verified(IDS, [2, 2, 2], [1, 2, 0])

        assert (("text", "", "heads"), ("", "two", "")) == (told(one).sources, told(two).sources)
        assert {"text", "heads", "two"} == drafting.report()["sources"].keys()

    def test_of_a_tree(self) -> None:
        def tree(step: DraftsStep) -> DraftsPlan:
            return DraftsPlan(tokens=torch.tensor([[1, 2]] * 3), parents=(-1, -1), sources=("far", "near", "far"))

        one = drafter("tree", tree)
        one.draft_nodes = lambda self, tokens: 9  # type: ignore[method-assign]
        drafting = seat(one)
        propose(drafting)
        drafting.verified(IDS, [2, 2, 2], [1, 0, 1])

        assert ("far", "near", "far") == told(one).sources

    def test_names_without_end(self) -> None:
        """They cost a few label values, and no draft."""
        names = iter(range(10**9))
        one = drafter("one", lambda step: sourced(ROWS, *(f"s{next(names)}" for _ in IDS))(step))
        drafting = seat(one)
        for _ in range(20):
            assert ROWS == propose(drafting)
            drafting.verified(IDS, [2, 1, 2], [1, 1, 1])
        found = drafting.report()["sources"]

        assert MOST_SOURCES + 1 == len(found)
        assert (60, 60 - MOST_SOURCES) == (sum(each["drafts"] for each in found.values()), found["other"]["drafts"])

    def test_a_step_that_came_to_nothing(self) -> None:
        """Its sources are forgotten with its drafts."""
        one = drafter("one", sourced(ROWS, "text", "text", "text"))
        drafting = seat(one)
        propose(drafting)
        drafting.dropped("the step was rolled back")
        drafting.verified(["a"], [1], [1])

        assert ("one",) == told(one).sources


class TestLimit:
    def test_it_moves_while_serving_and_nothing_is_loaded_anew(self) -> None:
        one = drafter("one", ROWS)
        drafting, limits = seat(one), []
        for change_ in (
            {"speculative__tokens": 2},
            {"speculative__plugin": "none"},
            {"speculative__tokens": 3},
            {"speculative__plugin": "one"},
        ):
            change(drafting, **change_)
            limits.append((drafting.limit, propose(drafting) is not None))

        assert [(2, True), (0, False), (0, False), (3, True)] == limits
        assert 1 == len(one.made)

    def test_memory_stays_leased_while_it_is_off(self) -> None:
        """So that on is at once."""
        one = drafter("one", ROWS)
        drafting = seat(one)
        lease = one.made[0].preparation.lease_memory(64)
        change(drafting, speculative__plugin="none")

        assert (False, 64) == (lease.closed, drafting.host.memory.counts.held)

    def test_a_config_of_its_own_is_a_new_generation(self) -> None:
        one = drafter("one", ROWS)
        drafting = seat(one)
        change(drafting, speculative__plugin="none")
        change(drafting, plugins__one__size=3)
        change(drafting, speculative__plugin="one")

        assert [0, 3] == [made.config.size for made in one.made]
        assert ROWS == propose(drafting)

    def test_an_engine_that_was_not_launched_to_speculate(self) -> None:
        """A plugin that is only seated is not asked."""
        one = drafter("one", ROWS)

        assert (0, None) == ((it := seat(one, **{"speculative.plugin": "none"})).limit, propose(it))

    @pytest.mark.parametrize(
        ("tokens", "launched_for", "words"),
        [
            (2, 0, "speculative.plugin = one: this engine was not launched to speculate"),
            (4, 3, "speculative.tokens = 4: the engine made room for 3 at start"),
            (3, 3, ""),
        ],
    )
    def test_a_change_is_held_against_what_the_engine_has(self, tokens: int, launched_for: int, words: str) -> None:
        host = seat(drafter("one", ROWS)).host
        before = host.spec.evolve({"speculative.tokens": 1}, catalogue=host.registry)
        spec = before.evolve({"speculative.tokens": tokens}, catalogue=host.registry)
        info = attrs.evolve(host.info, draft_tokens=launched_for)
        said = ""
        try:
            check_speculation(spec, before, info)
        except ControlError as error:
            said, status = str(error), error.status
            assert 409 == status

        assert said.startswith(words) if words else said == ""
        check_speculation(spec, spec, attrs.evolve(info, draft_tokens=0))  # what does not change is not refused


class TestUseless:
    def serve(self, drafting: Drafting, drafts: int, right: int) -> None:
        for number in range(drafts):
            propose(drafting, ["a"])
            drafting.verified(["a"], [1], [int(number < right)])

    @pytest.mark.parametrize(("right", "aside"), [(0, True), (int(TRIAL * USELESS) - 1, True), (10, False)])
    def test_drafts_that_are_never_right_end(self, right: int, aside: bool, caplog: pytest.LogCaptureFixture) -> None:
        """Heads for another model, or off by one position. The operator is told once, with numbers. Case: vllm#8620,
        483 drafts and none accepted."""
        drafting = seat(drafter("one", lambda step: DraftsPlan(tokens=step.last_tokens[:, None])))
        with caplog.at_level(logging.ERROR, "chunkllm"):
            self.serve(drafting, TRIAL - 1, right)
            assert 4 == drafting.limit
            self.serve(drafting, 1 + TRIAL, 0 if aside else TRIAL)

        assert aside == (drafting.limit == 0) == (caplog.text.count("drafts.stepped_aside") == 1)
        if aside:
            said = (
                f"the model agreed with the first token of {right} of {TRIAL} drafts: the heads were probably made for"
            )
            assert drafting.report()["stepped_aside"].startswith(said)
            assert ("stepped aside", {}) == (row(drafting, "one")["state"], row(drafting, "one")["failures"])

    @pytest.mark.parametrize(("heads", "text", "aside"), [(0, 1, True), (1, 0, True), (1, 1, False)])
    def test_right_drafts_do_not_cover_for_useless_ones(
        self, heads: int, text: int, aside: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each source is judged by its own drafts, and the log names it: copies that are right say nothing of heads."""
        drafting = seat(drafter("one", sourced([[1], [2], [3]], "heads", "text", "text")))
        with caplog.at_level(logging.ERROR, "chunkllm"):
            for _ in range(TRIAL):
                propose(drafting)
                drafting.verified(IDS, [1, 1, 1], [heads, text, text])

        assert aside == (drafting.limit == 0)
        if aside:
            assert f"the model agreed with the first token of 0 of {TRIAL} drafts" in drafting.report()["stepped_aside"]
            assert ("heads" if text else "text") in caplog.text

    def test_it_is_asked_again_and_again(self) -> None:
        """A good beginning is no licence."""
        drafting = seat(drafter("one", lambda step: DraftsPlan(tokens=step.last_tokens[:, None])))
        self.serve(drafting, TRIAL, TRIAL)
        self.serve(drafting, TRIAL, 0)

        assert 0 == drafting.limit

    @pytest.mark.parametrize(
        "changes",
        [
            [{"speculative__plugin": "none"}, {"speculative__plugin": "one"}],
            [{"plugins__one__size": 3}],
        ],
    )
    def test_off_and_on_or_another_config_is_a_new_chance(self, changes: list[dict[str, Any]]) -> None:
        drafting = seat(drafter("one", lambda step: DraftsPlan(tokens=step.last_tokens[:, None])))
        self.serve(drafting, TRIAL, 0)
        change(drafting, speculative__tokens=2)
        assert 0 == drafting.limit
        for each in changes:
            change(drafting, **each)
        assert (2, "") == (drafting.limit, drafting.report()["stepped_aside"])
        self.serve(drafting, TRIAL, 0)

        assert 0 == drafting.limit

    def test_only_the_useless_one_steps_aside(self) -> None:
        """Another goes on in its place."""
        good = drafter("good", [[-1], [4], [-1]])
        drafting = seat(drafter("bad", [[1], [-1], [-1]]), good)
        for _ in range(TRIAL):
            propose(drafting)
            drafting.verified(IDS, [1, 1, 0], [0, 1, 0])

        assert ("stepped aside", "active") == (row(drafting, "bad")["state"], row(drafting, "good")["state"])
        assert (4, [[-1], [4], [-1]]) == (drafting.limit, propose(drafting))


class TestModel:
    def test_the_plugin_may_look_into_the_model(self) -> None:
        one, model = drafter("one", ROWS), object()
        seat(one, model=model)

        assert model is one.made[0].preparation.model
