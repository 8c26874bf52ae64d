"""The plugin medusa: which heads it takes, what it drafts with them, and what the operator hears where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from chunkllm_bridge import DraftsPlan, DraftsStep, EngineInfo, Outcome, Preparation, Seam
from chunkllm_bridge.common.abi import Memory
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.fake import HIDDEN
from chunkllm_bridge.common.fake_model import FakeModel
from chunkllm_bridge.common.launching import draft_slots
from chunkllm_bridge.common.quota import Ledger
from chunkllm_bridge.common.testing import FakeBridge, FakeCatalogue, FakeEngine, attach, spec_for
from chunkllm_bridge.plugins.medusa import plugin as module
from chunkllm_bridge.plugins.medusa.plugin import Config, Medusa
from tests.support import fake_heads

TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
INFO = attrs.evolve(FakeEngine().info, draft_tokens=4, draft_nodes=4)
TREES = attrs.evolve(INFO, draft_nodes=6)
RAGGED = attrs.evolve(INFO, capabilities=INFO.capabilities | {"spec.ragged"})
TEXTS = ([1, 2, 3, 4, 1, 2], None, [5, 6, 7])  # one that repeats, one not read yet, one that is new


@pytest.fixture
def heads(tmp_path: Path) -> str:
    return str(fake_heads.write(tmp_path / "heads.safetensors"))


def prepared(config: Config, info: EngineInfo = INFO, ledger: Ledger | None = None, model: Any = None) -> Medusa:
    def lease_memory(nbytes: int) -> Memory | None:
        return (ledger or Ledger(2**30, name="memory")).lease("medusa", nbytes)

    plugin = Medusa(config)
    plugin.prepare(Preparation(info=info, generation=1, lease_memory=lease_memory, model=model or FakeModel()))
    return plugin


def step(requests: int = 2, most: int = 4, nodes: int = 4, *, texts: Sequence[list[int] | None] = ()) -> DraftsStep:
    """`texts`: of each request; None where they are not read yet."""
    hidden = torch.randn(requests, HIDDEN, generator=torch.Generator().manual_seed(1))
    ids = tuple(f"r{number}" for number in range(requests))
    last = torch.arange(requests) * 15
    for number, text in enumerate(texts):
        last[number] = text[-1] if text else 7

    def context(place: int, first: int) -> list[int] | None:
        text = texts[place]
        return None if text is None else text[first:]

    return DraftsStep(
        index=1,
        request_ids=ids,
        hidden_states=hidden,
        last_tokens=last,
        max_tokens=most,
        max_nodes=nodes,
        **({"context": context} if texts else {}),
    )


def drafted(plugin: Medusa, *given: int, texts: Sequence[list[int] | None] = ()) -> DraftsPlan:
    plan = plugin.plan_drafts(step(*given, texts=texts))
    assert plan is not None
    return plan


def reasons(config: Config, info: EngineInfo = INFO, **more: Any) -> list[str]:
    with pytest.raises(Exception) as caught:
        prepared(config, info, **more)
    return list(caught.value.reasons)  # type: ignore[attr-defined]


def test_a_chain_as_long_as_the_step_allows(heads: str) -> None:
    """The first of a longer chain are those of a shorter one."""
    plugin = prepared(Config(heads=heads))
    whole = drafted(plugin, 3, 4)

    assert ((3, 4), torch.int64, None) == (tuple(whole.tokens.shape), whole.tokens.dtype, whole.parents)
    assert torch.equal(whole.tokens[:, :2], drafted(plugin, 3, 2, 4).tokens)


def test_nobody_has_no_draft(heads: str) -> None:
    assert prepared(Config(heads=heads)).plan_drafts(step(0)) is None


def test_a_tree_where_the_engine_verifies_trees(heads: str) -> None:
    """Down to the depth that is allowed now; its first branch is the chain."""
    plugin = prepared(Config(heads=heads, tree=TREE), TREES)
    whole, shallow = drafted(plugin, 2, 4, 6), drafted(plugin, 2, 2, 6)

    assert ((-1, -1, 0, 0, 1, 2), (2, 6)) == (whole.parents, tuple(whole.tokens.shape))
    assert (-1, -1, 0, 0, 1) == shallow.parents
    chain = drafted(prepared(Config(heads=heads)), 2, 3, 3).tokens
    assert torch.equal(chain, whole.tokens[:, [0, 2, 5]])


def test_a_chain_where_the_engine_verifies_chains(heads: str) -> None:
    assert drafted(prepared(Config(heads=heads, tree=TREE))).parents is None


@pytest.mark.parametrize(("tokens", "nodes"), [(1, 2), (2, 5), (3, 6), (9, 9)])
def test_room_for_the_tree(tokens: int, nodes: int) -> None:
    """At launch, before there are any heads: down to the depth of the tokens, and never less than a chain."""
    assert nodes == Medusa(Config(tree=TREE)).draft_nodes(tokens)
    assert tokens == Medusa(Config()).draft_nodes(tokens)


@pytest.mark.parametrize("tree", [((0, 0),), ((),), ((-1,),), ((0,), (0,))])
def test_a_tree_that_is_none_is_a_mistake_in_the_spec(tree: Any) -> None:
    with pytest.raises(ValueError):
        Config(tree=tree)


def test_heads_that_are_not_there() -> None:
    """Told by the check, before a model is loaded."""
    (reason,) = Medusa(Config(heads="/nowhere/heads")).check(INFO)

    assert "plugins.medusa.heads = /nowhere/heads: there is no such file or folder" == reason


def test_more_tokens_than_heads_are_refused(tmp_path: Path) -> None:
    """With both numbers."""
    heads = str(fake_heads.write(tmp_path / "few.safetensors", heads=2))

    assert ["speculative.tokens = 4, and there are 2 heads: set it to 2, or train more heads"] == reasons(
        Config(heads=heads)
    )


def test_a_tree_that_needs_more_than_there_is_is_refused(tmp_path: Path) -> None:
    """Deeper than there are heads, wider than there are candidates: both are told."""
    heads = str(fake_heads.write(tmp_path / "few.safetensors", heads=2, candidates=3))
    tree = ((0,), (3,), (0, 0), (0, 0, 0))
    (reason,) = reasons(Config(heads=heads, tree=tree), attrs.evolve(INFO, draft_tokens=2))

    assert reason.startswith("plugins.medusa.tree: ")
    assert all(word in reason for word in ("3 deep and there are 2 heads", "rank 3"))


def test_memory_that_is_not_there_is_refused(heads: str) -> None:
    """With the bytes; the plugin's quota is what it may hold, and a request never pays for it."""
    ledger = Ledger(2**30, name="memory")
    ledger.set_limit(100, owner="medusa")
    (reason,) = reasons(Config(heads=heads), ledger=ledger)

    assert "bytes" in reason
    assert 0 == ledger.counts.held


def test_memory_is_what_the_heads_hold(heads: str) -> None:
    """And given back."""
    ledger = Ledger(2**30, name="memory")
    plugin = prepared(Config(heads=heads), ledger=ledger)
    held = ledger.counts.held
    plugin.close()
    plugin.close()

    assert (True, 0) == (held > 0, ledger.counts.held)
    assert plugin.plan_drafts(step()) is None


def test_an_engine_that_does_not_speculate_loads_nothing() -> None:
    """A table `[plugins.medusa]` alone seats it; it is asked for nothing."""
    plugin = prepared(Config(heads="/nowhere"), attrs.evolve(INFO, draft_tokens=0))

    assert (None, {}) == (plugin.plan_drafts(step()), plugin.snapshot())


def test_shipped_heads_are_found_by_the_model_s_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file is called. Where none fits, the operator is told what to do."""
    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    (reason,) = reasons(Config())
    assert reason.startswith("no heads for this model (fingerprint ")
    assert reason.endswith("train some with `chunkllm heads train`, or name a file in plugins.medusa.heads")
    fake_heads.write(tmp_path / "some.safetensors")

    assert 4 == drafted(prepared(Config())).tokens.shape[1]


def test_heads_of_another_model_are_refused_with_the_file_s_own_reasons(heads: str) -> None:
    """At the engine's start, as they are. Case: vllm#8620."""

    class Other(FakeModel):
        def rows(self, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
            return -super().rows(name, ids)

    (reason,) = reasons(Config(heads=heads), model=Other())

    assert "must be in step with the model" in reason


def test_the_operator_hears_the_reasons_and_no_traceback(tmp_path: Path) -> None:
    """The launch is refused with them, and nothing stays attached."""
    heads = fake_heads.write(tmp_path / "few.safetensors", heads=2)
    engine = FakeEngine()
    before = engine.functions()
    with pytest.raises(IncompatibleError) as caught:
        attach(engine, {"speculative.plugin": "medusa", "plugins.medusa.heads": str(heads)}, Medusa)

    assert ("speculative.tokens = 4, and there are 2 heads: set it to 2, or train more heads",) == caught.value.reasons
    assert before == engine.functions()


def test_slots_are_those_of_the_tree(heads: str) -> None:
    """The launch makes room for as many nodes as the plugin says."""
    engine, catalogue = FakeEngine(), FakeCatalogue(Medusa)
    settings = {"speculative.plugin": "medusa", "speculative.tokens": 3, "plugins.medusa.heads": heads}

    assert (3, 3) == draft_slots(spec_for(engine, settings, catalogue), catalogue)
    settings["plugins.medusa.tree"] = [list(path) for path in TREE]
    assert (3, 6) == draft_slots(spec_for(engine, settings, catalogue), catalogue)
    settings["plugin.disable"] = "medusa"
    assert draft_slots(spec_for(engine, settings, catalogue), catalogue) is None


def settled(plugin: Medusa, seconds: float, drafts: int, right: int) -> None:
    plugin.settle(
        Outcome(seam=Seam.DRAFTS, step=1, applied=True, drafted=(drafts,), accepted=(right,), seconds=seconds)
    )


@pytest.mark.parametrize(("adaptive", "depths"), [(True, {0}), (False, {4})])
def test_it_drafts_less_where_that_is_faster(heads: str, adaptive: bool, depths: set[int]) -> None:
    """From what it is told of steps; `adaptive = false` always drafts as many as allowed."""
    plugin, found = prepared(Config(heads=heads, adaptive=adaptive)), []
    for _ in range(600):
        plan = plugin.plan_drafts(step(1))
        depth = 0 if plan is None else plan.tokens.shape[1]
        settled(plugin, 0.01 * (1 + depth), depth, 0)
        found.append(depth)

    assert depths == set(found[-1:])


def secret(place: int, first: int) -> list[int]:
    raise AssertionError("nobody's text is to be asked for")


def plain(heads: str, *given: int, texts: Sequence[list[int] | None] = ()) -> torch.Tensor:
    """What the heads alone draft."""
    return drafted(prepared(Config(heads=heads, lookup=False)), *given, texts=texts).tokens


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("info", [INFO, RAGGED])
def test_copies_where_the_text_repeats(heads: str, info: EngineInfo, adaptive: bool) -> None:
    """And the heads' drafts for the others, as if there were no copies; each is counted as what it is."""
    plan = drafted(prepared(Config(heads=heads, adaptive=adaptive), info), 3, texts=TEXTS)

    assert [3, 4, 1, 2] == plan.tokens[0].tolist()
    assert torch.equal(plain(heads, 3, texts=TEXTS)[1:], plan.tokens[1:])
    assert (("text", "heads", "heads"), None, torch.int64) == (plan.sources, plan.parents, plan.tokens.dtype)


def test_copies_are_no_longer_than_the_step_allows(heads: str) -> None:
    plan = drafted(prepared(Config(heads=heads), RAGGED), 3, 2, 2, texts=TEXTS)

    assert ([3, 4], (3, 2)) == (plan.tokens[0].tolist(), tuple(plan.tokens.shape))


def test_no_text_repeats(heads: str) -> None:
    """The heads draft for all of them; where texts are not shown at all, too."""
    for texts in ((None, [5, 6, 7]), (None, None), ()):
        plan = drafted(prepared(Config(heads=heads)), 2, texts=texts)

        assert torch.equal(plain(heads, 2, texts=texts), plan.tokens)
        assert ("heads", "heads") == plan.sources


def test_every_text_repeats(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies cost no pass over the heads."""
    plugin = prepared(Config(heads=heads))
    monkeypatch.setattr(type(plugin._heads), "chain", lambda *args: 1 / 0)
    plan = drafted(plugin, 2, texts=(TEXTS[0], [8, 9, 8, 9]))

    assert ([[3, 4, 1, 2], [8, 9, 8, 9]], ("text", "text")) == (plan.tokens.tolist(), plan.sources)


def test_copies_follow_a_request(heads: str) -> None:
    """Over the steps of one, and over batches in which it stands elsewhere."""
    plugin = prepared(Config(heads=heads))
    drafted(plugin, 1, texts=TEXTS[:1])
    later = attrs.evolve(step(2, texts=([5, 6, 7], [*(TEXTS[0] or ()), 3])), request_ids=("r9", "r0"))
    plan = plugin.plan_drafts(later)

    assert plan is not None
    assert ([4, 1, 2, 3], ("heads", "text")) == (plan.tokens[1].tolist(), plan.sources)


def test_lookup_off(heads: str) -> None:
    """Nobody's text is asked for, and nothing is told apart."""
    plugin = prepared(Config(heads=heads, lookup=False), RAGGED)
    blind = attrs.evolve(step(3), context=secret)
    plan = plugin.plan_drafts(blind)

    assert plan is not None
    assert (None, (3, 4)) == (plan.sources, tuple(plan.tokens.shape))


def test_a_tree_goes_without_copies(heads: str) -> None:
    """They are chains. Where the engine verifies chains, there are copies."""
    plugin = prepared(Config(heads=heads, tree=TREE), TREES)
    blind = attrs.evolve(step(3, 4, 6), context=secret)
    plan = plugin.plan_drafts(blind)

    assert plan is not None
    assert ((-1, -1, 0, 0, 1, 2), None) == (plan.parents, plan.sources)
    chain = drafted(prepared(Config(heads=heads, tree=TREE)), 3, texts=TEXTS)
    assert (None, ("text", "heads", "heads")) == (chain.parents, chain.sources)


def test_copies_alone_where_heads_cost_too_much(heads: str) -> None:
    """On an engine that verifies what is drafted: the others decode plainly, and their rows are empty."""
    plugin = prepared(Config(heads=heads), RAGGED)
    for _ in range(600):
        plan = plugin.plan_drafts(step(3, texts=TEXTS))
        rows = [] if plan is None else plan.tokens.tolist()
        sources = ("", "", "") if plan is None or plan.sources is None else plan.sources
        counts = tuple(sum(token >= 0 for token in row) for row in rows or [[]] * 3)
        outcome = Outcome(
            seam=Seam.DRAFTS,
            step=1,
            applied=True,
            drafted=counts,
            accepted=tuple(count * (source == "text") for count, source in zip(counts, sources, strict=True)),
            sources=tuple(source if count else "" for count, source in zip(counts, sources, strict=True)),
            seconds=0.01 + 0.0001 * sum(counts) + 0.05 * (counts[1] > 0),
        )
        plugin.settle(outcome)

    assert [[3, 4, 1, 2], [-1] * 4, [-1] * 4] == rows
    assert "text" == sources[0]
    assert 1 / 3 == pytest.approx(plugin.snapshot()["shares"]["hits"], abs=0.05)


def served(bridge: FakeBridge) -> dict[str, list[int]]:
    for number in range(6):
        bridge.engine.add(prompt=4 + number, max_tokens=20)
    return bridge.engine.run()


@pytest.mark.parametrize("tree", [None, TREE])
def test_at_work(heads: str, tree: Any) -> None:
    """In an engine: drafts are verified and counted, and every token is the engine's own."""
    stock = FakeEngine()
    for number in range(6):
        stock.add(prompt=4 + number, max_tokens=20)
    settings: dict[str, Any] = {"speculative.plugin": "medusa", "plugins.medusa.heads": heads}
    if tree is not None:
        settings["plugins.medusa.tree"] = [list(path) for path in tree]
    with attach(FakeEngine(), settings, Medusa) as bridge:
        assert stock.run() == served(bridge)
        speculation = bridge.status()["speculation"]

    assert 0 < speculation["drafts"] == sum(count["drafts"] for count in speculation["sources"].values())
    assert ({"medusa"} if tree else {"heads", "text"}) >= speculation["sources"].keys()
    assert (4, 4, 4 if tree is None else 6) == tuple(speculation[key] for key in ("limit", "launched", "nodes"))


def test_the_operator_turns_copies_off(heads: str) -> None:
    """`plugins.medusa.lookup`: the heads alone draft, and what is drafted is the plugin's."""
    settings = {"speculative.plugin": "medusa", "plugins.medusa.heads": heads, "plugins.medusa.lookup": False}
    with attach(FakeEngine(), settings, Medusa) as bridge:
        served(bridge)

        assert {"medusa"} == bridge.status()["speculation"]["sources"].keys()
