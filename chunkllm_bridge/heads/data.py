"""Shards as batches: windows of neighbouring places, each to draft from, with the places that are to be drafted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from chunkllm_bridge.heads.generate import shard

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 31  # places to draft from in one window: 4 windows and 4 heads take 128 tokens


LIKELY = 8  # candidates that each place brings into the loss


@attrs.frozen(kw_only=True)
class Batch:
    """`windows` windows of WINDOW + heads places."""

    hidden: Tensor  # (windows, places, hidden)
    tokens: Tensor  # (windows, places) int64
    valid: Tensor  # (windows, places) bool: False beyond the end of an output
    likely: Tensor  # (windows, places, LIKELY) int64: what the model holds likely to be said there, best first


@attrs.frozen(kw_only=True)
class Data:
    """Everything said, in memory."""

    hidden: Tensor  # (n, hidden)
    tokens: Tensor  # (n,) int32
    starts: Tensor  # (windows,) int64
    ends: Tensor  # (windows,) int64: where the output of that window ends
    likely: Tensor | None = None  # (n, LIKELY) int32: places in the draft vocabulary

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Data:
        import torch

        hidden, tokens = [], []
        starts: list[int] = []
        ends: list[int] = []
        length = 0
        for path in paths:
            for said in shard(path):
                end = length + len(said.tokens)
                hidden.append(said.hidden)
                tokens.append(said.tokens)
                own = range(length, max(end - 1, length), WINDOW)  # the last place has nothing after it
                starts += own
                ends += [end] * len(own)
                length = end
        return cls(
            hidden=torch.cat(hidden), tokens=torch.cat(tokens), starts=torch.tensor(starts), ends=torch.tensor(ends)
        )

    def batch(self, windows: Tensor, heads: int) -> Batch:
        import torch

        assert self.likely is not None
        places = self.starts[windows][:, None] + torch.arange(WINDOW + heads)
        end = self.ends[windows][:, None]
        valid = places < end
        places = places.minimum(end - 1)
        likely = self.likely[places].long()
        return Batch(hidden=self.hidden[places], tokens=self.tokens[places].long(), valid=valid, likely=likely)

    def with_likely(self, head: Tensor) -> Data:
        """The same, with the best of the draft vocabulary at each place; `head` its rows, (candidates, hidden)."""
        import torch

        count = min(LIKELY, len(head))
        best = [(part.to(head.dtype) @ head.T).topk(count).indices.int() for part in self.hidden.split(1024)]
        return attrs.evolve(self, likely=torch.cat(best))

    def order(self, seed: int, epoch: int) -> Tensor:
        """The windows in the order of that epoch."""
        import torch

        return torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(seed * 1000 + epoch))

    def frequent(self, size: int, vocab: int) -> Tensor:
        """(size,) int32, ascending: the tokens that are said most; among those never said the lower ids."""
        import torch

        counts = torch.bincount(self.tokens, minlength=vocab)
        return counts.argsort(descending=True, stable=True)[: min(size, vocab)].sort().values.int()
