"""Which drafts the model agrees with: chains and trees, all requests of a batch at once. Tensors only, no device sync.

A verification has `rows` rows per request: row 0 is its newest token, row c + 1 the draft of column c. The model's own
choice at a row is the token that follows it, so a draft is right where it equals the choice at its parent's row.
Reference: `common/reference.py`.
"""

from __future__ import annotations

import functools
import itertools

import attrs
import torch

from chunkllm_bridge.common.fitting import levels


@attrs.frozen(eq=False)
class Shape:
    """How the rows of each request hang together; the same for all requests of a batch."""

    rows: int
    longest: int  # rows on the longest path
    depth: torch.Tensor  # (rows,) int64; the root has 0
    parent: torch.Tensor  # (rows - 1,) int64: the row of each draft's parent
    sees: torch.Tensor | None  # (rows, rows) bool: its ancestors and itself; None: a chain
    paths: torch.Tensor  # (rows, longest) int64: the rows from the root to each; beyond its end, each place itself
    levels: tuple[torch.Tensor, ...]  # the drafts' rows by depth, from 1; int64
    twins: torch.Tensor  # (rows - 1, rows - 1) bool: the first is an earlier child of the same parent
    next_token: torch.Tensor  # (rows,) int64 on the host: each row's first child, or -1
    next_sibling: torch.Tensor  # (rows,) int64 on the host


@attrs.frozen(eq=False)
class Accepted:
    """What a verification came to; (requests, ...) int64."""

    counts: torch.Tensor  # (requests,) accepted drafts
    last: torch.Tensor  # (requests,) the row of the last accepted draft, or 0
    paths: torch.Tensor | None  # (requests, longest) the rows of the accepted path; None: each place itself


@functools.lru_cache(maxsize=64)
def shape_of(width: int, parents: tuple[int, ...] | None, device: torch.device) -> Shape:
    """`parents` as in `DraftsPlan`; None: a chain of `width`."""
    above = tuple(range(-1, width - 1)) if parents is None else parents
    rows = width + 1
    ancestry: list[list[int]] = [[0]]  # of each row: the rows from the root to it
    for column, parent in enumerate(above):
        ancestry.append([*ancestry[parent + 1], column + 1])
    longest = max(len(path) for path in ancestry)
    sees = torch.zeros(rows, rows, dtype=torch.bool)
    next_token, next_sibling = torch.full((2, rows), -1)
    for row, path in enumerate(ancestry):
        sees[row, path] = True
        brothers = [column + 1 for column, parent in enumerate(above) if parent + 1 == row]
        for first, second in itertools.pairwise(brothers):
            next_sibling[first] = second
        if brothers:
            next_token[row] = brothers[0]
    places = list(range(longest))
    same = torch.tensor(above)[:, None] == torch.tensor(above)
    return Shape(
        rows=rows,
        longest=longest,
        depth=torch.tensor([len(path) - 1 for path in ancestry], device=device),
        parent=torch.tensor([parent + 1 for parent in above], device=device),
        sees=None if parents is None else sees.to(device),
        paths=torch.tensor([path + places[len(path) :] for path in ancestry], device=device),
        levels=tuple(torch.tensor([node + 1 for node in level], device=device) for level in levels(above)),
        twins=torch.triu(same, 1).to(device),
        next_token=next_token,
        next_sibling=next_sibling,
    )


def accept(shape: Shape, drafts: torch.Tensor, chosen: torch.Tensor) -> Accepted:
    """`drafts` (requests, rows - 1), negative where there is none; `chosen` (requests, rows): the model's tokens."""
    if shape.sees is None:
        counts = (drafts == chosen[:, :-1]).cumprod(1).sum(1)
        return Accepted(counts, counts, None)
    # of two equal brothers the first stands for both: taking the luckier one would change what is sampled
    doubled = ((drafts[:, :, None] == drafts[:, None, :]) & shape.twins).any(1)
    right = (drafts == chosen.index_select(1, shape.parent)) & ~doubled
    alive = right.new_ones(len(drafts), shape.rows)
    alive[:, 1:] = right
    for level in shape.levels[1:]:
        alive[:, level] &= alive[:, shape.parent[level - 1]]
    last = (alive * (shape.depth + 1)).argmax(1)  # at most one row of each depth is alive
    return Accepted(shape.depth[last], last, shape.paths[last])


def full_masks(shape: Shape, lengths: list[int], device: torch.device) -> torch.Tensor:
    """The requests' (rows, length + rows) masks one after the other, flat, as SGLang's GPU backends read them."""
    sees = shape.sees if shape.sees is not None else torch.ones(shape.rows, shape.rows, device=device).tril().bool()
    whole = sees.new_ones(shape.rows, max(lengths, default=0))
    return torch.cat([torch.cat([whole[:, :length], sees], 1).flatten() for length in lengths])
