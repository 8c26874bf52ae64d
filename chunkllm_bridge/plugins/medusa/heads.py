"""Draft heads: from a hidden state and the token it gave, the tokens that follow.

Two kinds. Independent heads (Medusa-1, arXiv 2401.10774): head k guesses the token k places on from the hidden state
alone. Sequential heads (after Hydra, arXiv 2402.05109): a state goes from head to head, and each also sees the
embedding of the draft token before it; they cost one pass over the draft vocabulary per token, and pay for it.

Heads speak a draft vocabulary, the most frequent tokens of the model, whose rows of the LM head are copied once. The
sequential ones look for the best token in two stages: all candidates through a narrow LM head, then the likeliest few
of them through the real one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from chunkllm_bridge.plugins.medusa.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6
NEAR = 32  # candidates that the narrow LM head picks for the real one


class Heads(ABC):
    """What both kinds have. All tensors are of the model's dtype and on its device."""

    kind: str

    def __init__(self, *, count: int, vocabulary: Tensor, facts: Mapping[str, Any], verified: bool) -> None:
        self.count = count  # the longest chain
        self.vocabulary = vocabulary  # (candidates,) int64: the model's id of each draft token
        self.facts = facts  # what the file says about itself
        self.verified = verified  # whether the file names the base model's fingerprint, and it is this model's
        self.candidates = len(vocabulary)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that they hold."""
        tensors = {id(value): value for value in vars(self).values() if hasattr(value, "element_size")}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    @abstractmethod
    def chain(self, hidden: Tensor, last_tokens: Tensor, width: int) -> Tensor:
        """(n, width) int64 from hidden (n, hidden_size) and last_tokens (n,); width is at most `count`."""

    @abstractmethod
    def tree(self, hidden: Tensor, last_tokens: Tensor, tree: Tree) -> Tensor:
        """(n, nodes) int64, in the order of the tree's nodes. Raises `ValueError` if it needs more than there is."""


class Independent(Heads):
    """Medusa-1: per head residual blocks x + silu(Wx + b), then the draft LM head, shared or each head's own."""

    kind = "independent"

    def __init__(
        self,
        *,
        weights: Tensor,  # (heads, blocks, hidden, hidden)
        biases: Tensor | None,  # (heads, blocks, hidden)
        head: Tensor,  # (candidates, hidden), or (heads, candidates, hidden)
        vocabulary: Tensor,
        facts: Mapping[str, Any],
        verified: bool,
    ) -> None:
        super().__init__(count=len(weights), vocabulary=vocabulary, facts=facts, verified=verified)
        heads, blocks, hidden, _ = weights.shape
        self._first = weights[:, 0].reshape(heads * hidden, hidden).contiguous() if blocks else None
        self._first_bias = None if biases is None or not blocks else biases[:, 0].reshape(-1).contiguous()
        self._rest = weights[:, 1:].permute(1, 0, 3, 2).contiguous()  # (blocks - 1, heads, in, out)
        self._rest_biases = None if biases is None else biases[:, 1:].permute(1, 0, 2)[:, :, None].contiguous()
        self._head = head.contiguous()

    def _logits(self, hidden: Tensor, width: int) -> Tensor:
        """(n, width, candidates)."""
        import torch
        from torch.nn.functional import linear, silu

        size = hidden.shape[1]
        hidden = hidden.to(self._head.dtype)
        states = hidden[:, None].expand(-1, width, -1)
        if self._first is not None:
            bias = None if self._first_bias is None else self._first_bias[: width * size]
            states = states + silu(linear(hidden, self._first[: width * size], bias)).view(-1, width, size)
        for block, weight in enumerate(self._rest):
            outer = states.transpose(0, 1)  # (width, n, hidden)
            moved = torch.bmm(outer, weight[:width])
            if self._rest_biases is not None:
                moved = moved + self._rest_biases[block, :width]
            states = (outer + silu(moved)).transpose(0, 1)
        if self._head.dim() == 2:
            return linear(states, self._head)
        return torch.bmm(states.transpose(0, 1), self._head[:width].transpose(1, 2)).transpose(0, 1)

    def chain(self, hidden: Tensor, last_tokens: Tensor, width: int) -> Tensor:
        return self.vocabulary[self._logits(hidden, width).argmax(-1)]

    def tree(self, hidden: Tensor, last_tokens: Tensor, tree: Tree) -> Tensor:
        tree.needs(self.count, self.candidates)
        best = self._logits(hidden, tree.depth).topk(tree.breadth, dim=-1).indices  # (n, depth, breadth)
        where = [(depth - 1) * tree.breadth + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
        return self.vocabulary[best.flatten(1)[:, where]]


class Sequential(Heads):
    """A state that goes from head to head: s + O(silu(g) * u) with (g, u) = A norm(s) + B norm(embedding) + b.

    B norm(embedding) is worked out for the whole draft vocabulary when the heads are loaded, so a step gathers one row
    instead of reading B. A token outside of the draft vocabulary counts as an embedding of zeros.
    """

    kind = "sequential"

    def __init__(
        self,
        *,
        states: Tensor,  # A: (heads or 1, layers, 2 * inner, hidden); 1 = shared by all heads
        tokens: Tensor,  # B norm(embedding): (heads or 1, candidates + 1, 2 * inner), its last row for other tokens
        outs: Tensor,  # O: (heads or 1, layers, hidden, inner)
        biases: Tensor,  # b: (heads, layers, 2 * inner)
        head: Tensor,  # (candidates, hidden)
        narrow: Tensor,  # (rank, hidden): what the first stage sees of a state
        coarse: Tensor,  # (candidates, rank): its LM head
        rows: Tensor,  # (vocab_size,) int64: each token's place in the draft vocabulary; `candidates` if it has none
        vocabulary: Tensor,
        facts: Mapping[str, Any],
        verified: bool,
    ) -> None:
        super().__init__(count=len(biases), vocabulary=vocabulary, facts=facts, verified=verified)
        self._states, self._tokens, self._outs = states.contiguous(), tokens.contiguous(), outs.contiguous()
        self._biases, self._head, self._rows = biases.contiguous(), head.contiguous(), rows
        self._narrow, self._coarse = narrow.contiguous(), coarse.contiguous()
        layers = range(states.shape[1])
        shared = [min(head, len(states) - 1) for head in range(self.count)]
        self._steps = [
            [(self._states[own, layer], self._outs[own, layer], self._biases[head, layer]) for layer in layers]
            for head, own in enumerate(shared)
        ]
        self._tables = [self._tokens[own] for own in shared]

    def _step(self, states: Tensor, row: Tensor, head: int) -> Tensor:
        """(n, hidden): the state after a head, from the one before and the place of the token before (n,)."""
        from torch.nn.functional import rms_norm, silu

        size = states.shape[-1:]
        for layer, (inwards, outwards, bias) in enumerate(self._steps[head]):
            both = product(rms_norm(states, size, eps=EPS), inwards) + bias
            if layer == 0:
                both = both + self._tables[head][row]
            gate, up = both.chunk(2, -1)
            states = states + product(silu(gate) * up, outwards)
        return states

    def _best(self, states: Tensor, count: int) -> Tensor:
        """(n, count) int64: the likeliest places in the draft vocabulary, the likeliest first."""
        near = product(product(states, self._narrow), self._coarse).topk(self._near, dim=-1).indices
        exact = (self._head[near] @ states[:, :, None])[..., 0]
        if count == 1:
            return near.gather(1, exact.argmax(-1, keepdim=True))
        return near.gather(1, exact.topk(count, dim=-1).indices)

    @property
    def _near(self) -> int:
        return min(NEAR, self.candidates)

    def chain(self, hidden: Tensor, last_tokens: Tensor, width: int) -> Tensor:
        import torch

        # One row would make the matrix products copy their weights first: see `product`.
        twice = len(hidden) == 1 and hidden.device.type == "cpu"
        states, row = hidden.to(self._head.dtype), self._rows[last_tokens]
        if twice:
            states, row = states.expand(2, -1), row.expand(2)
        picked = []
        for head in range(width):
            states = self._step(states, row, head)
            row = self._best(states, 1)[:, 0]
            picked.append(row)
        return self.vocabulary[torch.stack(picked, 1)[: len(hidden)]]

    def tree(self, hidden: Tensor, last_tokens: Tensor, tree: Tree) -> Tensor:
        import torch

        tree.needs(self.count, self._near)
        n, size = hidden.shape
        states, row = hidden.to(self._head.dtype)[:, None], self._rows[last_tokens][:, None]  # (n, nodes of a level)
        picked = []
        for head, (asked, breadth, flat) in enumerate(_levels(tree)):
            states = self._step(states[:, asked].flatten(0, 1), row[:, asked].flatten(), head)
            row = self._best(states, breadth).view(n, -1)[:, flat]
            states = states.view(n, -1, size)[:, [place // breadth for place in flat]]
            picked.append(row)
        return self.vocabulary[torch.cat(picked, 1)]


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows (n, in) times matrix (out, in): (n, out).

    On a CPU in bfloat16 oneDNN multiplies the matrix as it lies when it stands on the left, and copies it into another
    order when it stands on the right, or when there is but one row; that copy costs more than the product.
    """
    from torch.nn.functional import linear

    if rows.device.type != "cpu":
        return linear(rows, matrix)
    return (matrix @ rows.T).T


@lru_cache(maxsize=64)
def _levels(tree: Tree) -> list[tuple[list[int], int, list[int]]]:
    """Per depth: the nodes of the level above that have children, the candidates each must give, and for every node of
    this level its place in (those parents x candidates), flattened."""
    levels = []
    above = [-1]
    for depth in range(1, tree.depth + 1):
        nodes = [node for node, own in enumerate(tree.depths) if own == depth]
        parents = sorted({tree.parents[node] for node in nodes})
        breadth = max(tree.ranks[node] for node in nodes) + 1
        flat = [parents.index(tree.parents[node]) * breadth + tree.ranks[node] for node in nodes]
        levels.append(([above.index(parent) for parent in parents], breadth, flat))
        above = nodes
    return levels
