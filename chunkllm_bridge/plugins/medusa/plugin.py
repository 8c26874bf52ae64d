"""Medusa on both engines: heads on the model's last hidden state draft tokens, and the engine verifies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from chunkllm_bridge import DraftsPlan, DraftsStep, EngineInfo, Model, Outcome, Plugin, PluginSpec, Preparation, Seam
from chunkllm_bridge.plugins.medusa.pace import Pace
from chunkllm_bridge.plugins.medusa.tree import Tree

if TYPE_CHECKING:
    from chunkllm_bridge.plugins.medusa.heads import Heads

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
    adaptive: bool = True  # draft fewer where measured step times say that it pays; False: always as many as allowed

    def __attrs_post_init__(self) -> None:
        if self.tree is not None:
            Tree.of(self.tree)  # ValueError with what is wrong in it


class Medusa(Plugin):
    spec = PluginSpec(
        name="medusa",
        version="1.0",
        abi=(1, 1),
        seams={Seam.DRAFTS},
        requires={"spec.chain"},
        optional={"spec.tree"},
        summary="drafts tokens with Medusa heads, as a chain or a tree; drafts less under load",
    )
    Config = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heads: Heads | None = None
        self._trees: list[Tree | None] = []  # by depth, from 0; empty: chains
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
        costs = [0, *(len(tree.parents) for tree in self._trees if tree)] if self._trees else range(most + 1)
        self._pace = Pace(costs) if self.config.adaptive else None
        self._heads = heads

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan | None:
        heads, requests = self._heads, len(step.request_ids)
        if heads is None or not requests:
            return None
        trees = self._trees if step.max_nodes > step.max_tokens else []
        most = min(step.max_tokens, len(trees) - 1 if trees else heads.count)
        depth = most if self._pace is None else self._pace.depth(requests, min(most, self._pace.most))
        if depth < 1:
            return None
        tree = trees[depth] if trees else None
        if tree is not None and fits(tree, step.max_nodes):
            return DraftsPlan(tokens=heads.tree(step.hidden_states, step.last_tokens, tree), parents=tree.parents)
        return DraftsPlan(tokens=heads.chain(step.hidden_states, step.last_tokens, depth))

    def settle(self, outcome: Outcome) -> None:
        if self._pace is not None:
            self._pace.settle(outcome.drafted, outcome.accepted, outcome.seconds)

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
