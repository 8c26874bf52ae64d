"""Medusa on both engines: heads on the model's last hidden state draft tokens, and the engine verifies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from chunkllm_bridge import DraftsPlan, DraftsStep, EngineInfo, Model, Outcome, Plugin, PluginSpec, Preparation, Seam
from chunkllm_bridge.plugins.medusa.levels import chains, trees
from chunkllm_bridge.plugins.medusa.lookup import SOURCE, Lookup
from chunkllm_bridge.plugins.medusa.pace import Pace
from chunkllm_bridge.plugins.medusa.tree import Tree

if TYPE_CHECKING:
    from chunkllm_bridge.plugins.medusa.heads import Heads

HEADS = "heads"  # what drafts of theirs are counted as, where there are copies beside them
SHIPPED = Path(__file__).with_name("shipped")


class RefusedError(Exception):
    """Why these heads cannot serve here; lists every reason."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(reasons))


@attrs.frozen(kw_only=True)
class Config:
    heads: str | None = attrs.field(  # a file or folder of draft heads; None: those shipped for the model
        default=None, validator=attrs.validators.optional(attrs.validators.min_len(1))
    )
    tree: tuple[tuple[int, ...], ...] | None = None  # Medusa's choices: paths of ranks, one per node; None: a chain
    lookup: bool = True  # where a request's newest tokens stood in its text before, draft what followed them there
    adaptive: bool = True  # draft fewer where measured step times say that it pays; False: always as many as allowed

    def __attrs_post_init__(self) -> None:
        if self.tree is not None:
            Tree.of(self.tree)  # ValueError with what is wrong in it


class Medusa(Plugin):
    spec = PluginSpec(
        name="medusa",
        version="1.0",
        abi=(1, 2),
        seams={Seam.DRAFTS},
        requires={"spec.chain"},
        optional={"spec.tree", "spec.ragged"},
        summary="drafts tokens with Medusa heads, as a chain or a tree; drafts less under load",
    )
    Config = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heads: Heads | None = None
        self._trees: list[Tree | None] = []  # by depth, from 0; empty: chains
        self._lookup: Lookup | None = None
        self._most = 0
        self._pace: Pace | None = None
        self._memory: Any = None

    def draft_nodes(self, tokens: int) -> int:
        """As many as the tree has down to that depth."""
        tree = None if self.config.tree is None else pruned(Tree.of(self.config.tree), tokens)
        return tokens if tree is None else max(tokens, len(tree.parents))

    def check(self, info: EngineInfo) -> Sequence[str]:
        if self.config.heads is not None and not Path(self.config.heads).expanduser().exists():
            return [f"plugins.medusa.heads = {self.config.heads}: there is no such file or folder"]
        return ()

    def prepare(self, preparation: Preparation) -> None:
        """Find, load and measure the heads. An engine that was not launched to speculate needs none."""
        info, model = preparation.info, preparation.model
        if not info.draft_tokens:
            return
        if model is None:
            raise RefusedError([f"{info.engine} {info.version} does not show the model to plugins"])
        from chunkllm_bridge.plugins.medusa import formats

        heads = formats.load(self._path(model), model)
        shape = None if self.config.tree is None else Tree.of(self.config.tree)
        if reasons := [*_too_few(heads, info, shape)]:
            raise RefusedError(reasons)
        self._memory = preparation.lease_memory(heads.nbytes)
        if self._memory is None:
            raise RefusedError(
                [f"the heads hold {heads.nbytes} bytes, more than plugin.memory_ratio leaves them; raise it"]
            )
        most = min(info.draft_tokens, heads.count)
        self._trees = []
        if shape is not None and info.draft_nodes > info.draft_tokens:
            depths = range(1, min(most, shape.depth) + 1)
            fitting = [tree for tree in (pruned(shape, depth) for depth in depths) if fits(tree, info.draft_nodes)]
            self._trees = [None, *fitting] if fitting else []
        self._lookup = Lookup() if self.config.lookup and not self._trees else None
        ragged = "spec.ragged" in info.capabilities
        if self._trees:
            levels = trees([len(tree.parents) for tree in self._trees if tree])
        else:
            levels = chains(most, copies=self._lookup is not None, ragged=ragged)
        self._most, self._all = levels[-1].drafted, levels[-1]
        self._pace = Pace(levels, ragged=ragged) if self.config.adaptive else None
        self._heads = heads

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan | None:
        heads, requests = self._heads, len(step.request_ids)
        if heads is None or not requests:
            return None
        chain = step.max_nodes <= step.max_tokens  # that is all the engine verifies now
        most = min(step.max_tokens, heads.count if chain else self._most)
        level = self._all.within(most) if self._pace is None else self._pace.level(requests, most, step.index)
        depth = min(level.drafted, most)
        tree = self._trees[depth] if self._trees and not chain else None
        if tree is not None and fits(tree, step.max_nodes):
            return DraftsPlan(tokens=heads.tree(step.hidden_states, step.last_tokens, tree), parents=tree.parents)
        copies = None
        if self._lookup is not None and level.copied:
            copies = self._lookup.draft(step.request_ids, step.last_tokens.tolist, step.context, level.copied)
        if copies is None or not any(copies):
            if depth < 1:
                return None
            sources = None if copies is None else (HEADS,) * requests
            return DraftsPlan(tokens=heads.chain(step.hidden_states, step.last_tokens, depth), sources=sources)
        return mixed(step, heads, copies, depth)

    def settle(self, outcome: Outcome) -> None:
        if self._pace is not None:
            copied = None if self._lookup is None else [source == SOURCE for source in outcome.sources]
            self._pace.settle(outcome.drafted, outcome.accepted, outcome.seconds, copied, outcome.step)

    def snapshot(self) -> Mapping[str, Any]:
        return {} if self._pace is None else self._pace.snapshot()

    def migrate(self, state: Mapping[str, Any]) -> None:
        if self._pace is not None:
            self._pace.migrate(state)

    def close(self) -> None:
        self._heads = None
        if self._memory is not None:
            self._memory.close()

    def _path(self, model: Model) -> Path:
        if self.config.heads is not None:
            return Path(self.config.heads).expanduser()
        from chunkllm_bridge.plugins.medusa import formats

        ours = formats.fingerprint(model)
        for file in sorted(SHIPPED.glob("*.safetensors")):
            if formats.read(file)[0].get("base_fingerprint") == ours:
                return file
        raise RefusedError(
            [
                f"no heads for this model (fingerprint {ours[:12]}): train some with `chunkllm heads train`, or name a "
                "file in plugins.medusa.heads"
            ]
        )


def mixed(step: DraftsStep, heads: Heads, copies: Sequence[Sequence[int]], depth: int) -> DraftsPlan:
    """Copies where there are any; the heads' drafts for the others."""
    others = [row for row, copy in enumerate(copies) if not copy]
    width = max(depth if others else 0, *(len(copy) for copy in copies))
    rows = [[*copy, *[-1] * (width - len(copy))] for copy in copies]
    tokens = step.last_tokens.new_tensor(rows)
    if others and depth:
        tokens[others, :depth] = heads.chain(step.hidden_states[others], step.last_tokens[others], depth)
    return DraftsPlan(tokens=tokens, sources=tuple(SOURCE if copy else HEADS for copy in copies))


def pruned(tree: Tree, depth: int) -> Tree:
    """The nodes down to a depth; a tree's nodes stand in the order of their depths."""
    nodes = sum(own <= depth for own in tree.depths)
    return Tree(tree.parents[:nodes], tree.ranks[:nodes], tree.depths[:nodes])


def fits(tree: Tree, nodes: int) -> bool:
    return len(tree.parents) <= nodes


def _too_few(heads: Heads, info: EngineInfo, tree: Tree | None) -> Iterator[str]:
    if info.draft_tokens > heads.count:
        yield (
            f"speculative.tokens = {info.draft_tokens}, and there are {heads.count} heads: set it to {heads.count}, or "
            "train more heads"
        )
    if tree is not None:
        try:
            tree.needs(heads.count, heads.candidates)
        except ValueError as error:
            yield f"plugins.medusa.tree: {error}"
