"""The plugin medusa: which heads it takes, what it drafts with them, and what the operator hears where it cannot."""

from __future__ import annotations

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


@pytest.fixture
def heads(tmp_path: Path) -> str:
    return str(fake_heads.write(tmp_path / "heads.safetensors"))


def prepared(config: Config, info: EngineInfo = INFO, ledger: Ledger | None = None, model: Any = None) -> Medusa:
    def lease_memory(nbytes: int) -> Memory | None:
        return (ledger or Ledger(2**30, name="memory")).lease("medusa", nbytes)

    plugin = Medusa(config)
    plugin.prepare(Preparation(info=info, generation=1, lease_memory=lease_memory, model=model or FakeModel()))
    return plugin


def step(requests: int = 2, most: int = 4, nodes: int = 4) -> DraftsStep:
    hidden = torch.randn(requests, HIDDEN, generator=torch.Generator().manual_seed(1))
    ids = tuple(f"r{number}" for number in range(requests))
    last = torch.arange(requests) * 15
    return DraftsStep(
        index=1, request_ids=ids, hidden_states=hidden, last_tokens=last, max_tokens=most, max_nodes=nodes
    )


def drafted(plugin: Medusa, *given: int) -> DraftsPlan:
    plan = plugin.plan_drafts(step(*given))
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

    assert 0 < speculation["drafts"]
    assert (4, 4, 4 if tree is None else 6) == tuple(speculation[key] for key in ("limit", "launched", "nodes"))
