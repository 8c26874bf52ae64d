"""The arithmetic between two attention calls as functions of tensors, so that one compiled copy serves every layer.

Norms and rotations are computed in float32 and rounded once, as SGLang's own native operations do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
    Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, residual


@attrs.frozen(kw_only=True)
class Shape:
    """What all layers of a model have in common."""

    heads: int  # of the queries, on this rank
    kv_heads: int
    head_dim: int
    eps: float


class Entry(NamedTuple):
    """The weights from a residual to the next attention."""

    norm: torch.Tensor  # (hidden,)
    qkv: torch.Tensor  # ((heads + 2 * kv_heads) * head_dim, hidden)
    bias: torch.Tensor | None  # of qkv


class Exit(NamedTuple):
    """The weights from an attention to the end of its layer."""

    out: torch.Tensor  # (hidden, heads * head_dim)
    norm: torch.Tensor  # (hidden,)
    gate_up: torch.Tensor  # (2 * intermediate, hidden)
    down: torch.Tensor  # (hidden, intermediate)


class Rotation(NamedTuple):
    """Of each row's position; the sine's first half is negative."""

    cos: torch.Tensor  # (rows, 1, head_dim), float32
    sin: torch.Tensor


@attrs.frozen
class Pieces:
    """Compiled or not, the same functions; all take and give (rows, ...) tensors."""

    head: Callable[[torch.Tensor, Entry, Rotation], Heads]  # embedded -> first attention
    between: Callable[[torch.Tensor, torch.Tensor, Exit, Entry, Rotation], Heads]  # attention, residual -> next one
    tail: Callable[[torch.Tensor, torch.Tensor, Exit, torch.Tensor], torch.Tensor]  # last attention -> final norm


def make_pieces(
    shape: Shape,
    linear: Linear,
    compiler: Compiler | None,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Pieces:
    """The functions for a model of that shape. `reduce` sums over the ranks of a tensor-parallel group, uncompiled."""
    split = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + shape.eps).rsqrt()
        return (wide * weight).to(x.dtype)

    def rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, shape.head_dim).float()
        turned = heads * rotation.cos + heads.roll(shape.head_dim // 2, -1) * rotation.sin
        return turned.to(x.dtype).view(x.shape[0], -1)

    def head(residual: torch.Tensor, entry: Entry, rotation: Rotation) -> Heads:
        qkv = linear(normed(residual, entry.norm), entry.qkv)
        if entry.bias is not None:
            qkv = qkv + entry.bias
        q, k, v = qkv.split_with_sizes(split, -1)
        return rotated(q, rotation), rotated(k, rotation), v.contiguous(), residual

    def project(attention: torch.Tensor, exit: Exit) -> torch.Tensor:
        return linear(attention, exit.out)

    def feed(update: torch.Tensor, residual: torch.Tensor, exit: Exit) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + update
        gate, up = linear(normed(residual, exit.norm), exit.gate_up).chunk(2, -1)
        return linear(gate * gate.sigmoid() * up, exit.down), residual

    def enter(update: torch.Tensor, residual: torch.Tensor, entry: Entry, rotation: Rotation) -> Heads:
        return head(residual + update, entry, rotation)

    def finish(update: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return normed(residual + update, norm)

    wrap = compiler or (lambda function: function)
    if reduce is not None:
        project, feed, enter, finish = wrap(project), wrap(feed), wrap(enter), wrap(finish)
    total = reduce or (lambda update: update)

    def left(attention: torch.Tensor, residual: torch.Tensor, exit: Exit) -> tuple[torch.Tensor, torch.Tensor]:
        update, residual = feed(total(project(attention, exit)), residual, exit)
        return total(update), residual

    def between(attention: torch.Tensor, residual: torch.Tensor, exit: Exit, entry: Entry, rotation: Rotation) -> Heads:
        return enter(*left(attention, residual, exit), entry, rotation)

    def tail(attention: torch.Tensor, residual: torch.Tensor, exit: Exit, norm: torch.Tensor) -> torch.Tensor:
        return finish(*left(attention, residual, exit), norm)

    if reduce is not None:
        return Pieces(wrap(head), between, tail)
    return Pieces(wrap(head), wrap(between), wrap(tail))
