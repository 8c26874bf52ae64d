"""The second stage: training, on float32 master weights with matrix products in the model's dtype."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from chunkllm_bridge.heads import nets
from chunkllm_bridge.heads.data import WINDOW, Batch, Data
from chunkllm_bridge.heads.loss import distil
from chunkllm_bridge.plugins.medusa.formats import seen

if TYPE_CHECKING:
    from torch import Tensor

WARMUP = 100  # steps


@attrs.frozen(kw_only=True)
class Recipe:
    """What decides the outcome, with the data and the machine's arithmetic."""

    steps: int
    windows: int = 32  # per step
    rate: float = 1e-3
    decay: float = 0.05  # AdamW's
    hard: float = 0.3  # share of the teacher's best token in the target
    later: float = 0.8  # a head counts so much of the one before it
    candidates: int = 2048  # tokens in the loss of a step; the likely ones of its places are always among them
    noise: float = 0.1  # on the hidden states, in parts of their size
    seed: int = 0


@attrs.frozen(kw_only=True)
class Base:
    """The model's rows for the draft vocabulary."""

    vocabulary: Tensor  # (candidates,) int64
    rows: Tensor  # (vocab_size,) int64: place in the draft vocabulary, or `candidates`
    embedding: Tensor  # (candidates + 1, hidden or 2 * hidden): what is seen of each token; the last row is zeros
    head: Tensor  # (candidates, hidden)
    follow: Tensor | None = None  # (candidates, hidden): the model's state after each token alone

    @classmethod
    def of(
        cls, vocabulary: Tensor, size: int, embedding: Tensor, head: Tensor, dtype: Any, follow: Tensor | None = None
    ) -> Base:
        import torch

        ids = vocabulary.long()
        rows = torch.full((size,), len(ids))
        rows[ids] = torch.arange(len(ids))
        known = seen(embedding, follow).to(dtype)
        return cls(vocabulary=ids, rows=rows, embedding=known, head=head.to(dtype), follow=follow)


@attrs.define
class Training:
    """Weights and optimiser at a step; `go` makes steps."""

    shape: nets.Shape
    recipe: Recipe
    base: Base
    data: Data
    weights: dict[str, Tensor]
    optimiser: Any
    step: int = 0

    @classmethod
    def begin(cls, shape: nets.Shape, recipe: Recipe, base: Base, data: Data) -> Training:
        import torch

        data = data.with_likely(base.head)
        weights = nets.parameters(shape, recipe.seed, base.embedding.shape[1])
        optimiser = torch.optim.AdamW(
            list(weights.values()), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=recipe.decay
        )
        return cls(shape, recipe, base, data, weights, optimiser)

    def rate(self) -> float:
        """Up over WARMUP steps, then down half a cosine to a hundredth."""
        recipe = self.recipe
        warm = min(1.0, (self.step + 1) / min(WARMUP, max(recipe.steps // 10, 1)))
        return recipe.rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.step / recipe.steps)))

    def windows(self) -> Tensor:
        """The windows of this step: each epoch goes through all of them once, in an order of its own."""
        per_epoch = max(len(self.data.starts) // self.recipe.windows, 1)
        epoch, place = divmod(self.step, per_epoch)
        first = place * self.recipe.windows
        return self.data.order(self.recipe.seed, epoch)[first : first + self.recipe.windows]

    def go(self) -> tuple[float, list[float]]:
        """One step: the loss, and per head the share of places where it agreed with the model."""
        import torch

        recipe, heads = self.recipe, self.shape.heads
        batch = self.data.batch(self.windows(), heads)
        dtype = self.base.head.dtype
        hidden = batch.hidden.to(dtype)
        count, places, size = hidden.shape
        anchors, tokens = self._inputs(batch)
        if recipe.noise:
            random = torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.step)
            scale = anchors.float().pow(2).mean(-1, keepdim=True).sqrt() * recipe.noise
            anchors = (anchors.float() + torch.randn(anchors.shape, generator=random) * scale).to(dtype)
        grid = torch.arange(count * places).view(count, places)
        place = torch.stack([grid[:, head : head + WINDOW].flatten() for head in range(1, heads + 1)]).flatten()
        valid = torch.stack([batch.valid[:, head : head + WINDOW].flatten() for head in range(1, heads + 1)])
        worth = valid * recipe.later ** torch.arange(heads)[:, None]

        given = nets.forward(self.shape.kind, self.weights, anchors, tokens).flatten(0, 1)
        head = self.base.head[self.candidates(batch)]
        found = distil(
            given.detach().to(dtype), hidden.reshape(-1, size), place, head, worth.flatten().float(), hard=recipe.hard
        )
        self.optimiser.zero_grad(set_to_none=True)
        given.backward(found.slope)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()
        self.optimiser.step()
        self.step += 1
        agreed = (found.agreed.view(heads, -1) & valid).sum(1) / valid.sum(1).clamp(min=1)
        return float(found.loss), agreed.tolist()

    def candidates(self, batch: Batch) -> Tensor:
        """Places in the draft vocabulary that the loss of this step is over: what is likely there, and others."""
        import torch

        likely: Tensor = batch.likely[batch.valid].unique()
        count = len(self.base.head)
        if len(likely) >= self.recipe.candidates or count <= self.recipe.candidates:
            return likely if count > self.recipe.candidates else torch.arange(count)
        random = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        others = torch.randperm(count, generator=random)[: self.recipe.candidates]
        both: Tensor = torch.cat([likely, others]).unique()
        return both

    def given(self, windows: int) -> Tensor:
        """(rows, hidden): what the heads put into the LM head at places of some windows."""
        import torch

        batch = self.data.batch(self.data.order(self.recipe.seed, 0)[:windows], self.shape.heads)
        with torch.no_grad():
            return nets.forward(self.shape.kind, self.weights, *self._inputs(batch)).flatten(0, 1)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(n, hidden): the states drafted from; (heads, n, width): what is seen of the token before each head."""
        import torch

        hidden = batch.hidden.to(self.base.head.dtype)
        size = hidden.shape[-1]
        embedded = self.base.embedding[self.base.rows[batch.tokens]]
        tokens = [embedded[:, head : head + WINDOW].flatten(0, 1) for head in range(self.shape.heads)]
        return hidden[:, :WINDOW].reshape(-1, size), torch.stack(tokens)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.weights.items()}

    def save(self, path: Path) -> None:
        """The state, there whole or not at all."""
        import torch

        partial = path.with_suffix(".partial")
        torch.save({"step": self.step, "weights": self.tensors(), "optimiser": self.optimiser.state_dict()}, partial)
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        import torch

        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        with torch.no_grad():
            for name, tensor in state["weights"].items():
                self.weights[name].copy_(tensor)
        self.optimiser.load_state_dict(state["optimiser"])


def train(training: Training, state: Path, every: int, heard: Callable[[int, float, list[float]], None]) -> None:
    """Make the steps that are left; the state is saved each `every` steps and at the end."""
    while training.step < training.recipe.steps:
        loss, agreed = training.go()
        heard(training.step, loss, agreed)
        if training.step % every == 0 or training.step == training.recipe.steps:
            training.save(state)
