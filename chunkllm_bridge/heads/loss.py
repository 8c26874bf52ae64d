"""Distillation over candidate tokens, and its gradient, in one go: the LM head is frozen, so no logits are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1024  # rows whose logits exist at once


@attrs.frozen(kw_only=True)
class Distilled:
    """The outcome for a batch."""

    loss: Tensor  # () float32, the weighted mean
    slope: Tensor  # (rows, hidden) float32: the gradient by what the heads gave
    agreed: Tensor  # (rows,) bool: the same best candidate as the teacher's


def distil(
    given: Tensor,  # (rows, hidden): what the heads put into the LM head
    states: Tensor,  # (places, hidden): the model's own hidden states
    place: Tensor,  # (rows,) int64: which of them the row is to agree with
    head: Tensor,  # (candidates, hidden): the candidates' rows of the LM head
    weights: Tensor,  # (rows,) float32: how much each row counts; 0 = not at all
    *,
    hard: float,  # share of the teacher's best token in the target; the rest is its distribution
) -> Distilled:
    """Cross-entropy of the heads against the model, both over the candidates."""
    import torch

    wanted = (states @ head.T).float()  # (places, candidates): once, though several heads look at each place
    best = wanted.argmax(-1)
    soft = wanted.softmax(-1).mul_(1 - hard)
    soft.scatter_add_(1, best[:, None], torch.full_like(soft[:, :1], hard))
    soft = soft.to(head.dtype)
    share = weights / weights.sum().clamp(min=1)
    loss = torch.zeros((), device=given.device)
    slope = torch.empty(given.shape, device=given.device)
    agreed = torch.empty(len(given), dtype=torch.bool, device=given.device)
    for first in range(0, len(given), CHUNK):
        rows = slice(first, first + CHUNK)
        own = place[rows]
        logits = (given[rows] @ head.T).float()
        logs = logits.log_softmax(-1)
        agreed[rows] = logits.argmax(-1) == best[own]
        target = soft[own]
        loss -= ((target * logs).sum(-1) * share[rows]).sum()
        difference = logs.exp_().sub_(target).to(head.dtype)
        slope[rows] = (difference @ head).float() * share[rows, None]
    return Distilled(loss=loss, slope=slope, agreed=agreed)
