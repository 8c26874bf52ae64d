"""Draft heads as they are trained: float32 master weights under the names that the file gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from chunkllm_bridge.plugins.medusa.heads import EPS

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("sequential", "independent")


@attrs.frozen(kw_only=True)
class Shape:
    """What a network is built from."""

    kind: str
    heads: int
    hidden: int
    inner: int = 1024  # sequential: gated units per layer
    layers: int = 1  # sequential: layers of a step; independent: residual blocks of a head
    shared: bool = True  # sequential: one set of weights for all heads (their biases differ)


def parameters(shape: Shape, seed: int, width: int | None = None) -> dict[str, Tensor]:
    """Fresh weights: every head begins by repeating what the hidden state says; `width` of what it sees of a token."""
    import torch

    random = torch.Generator().manual_seed(seed)

    def normal(*size: int, gain: float = 1.0) -> Tensor:
        made: Tensor = torch.randn(*size, generator=random) * gain * size[-1] ** -0.5
        return made

    heads, hidden, layers, double = shape.heads, shape.hidden, shape.layers, 2 * shape.inner
    if shape.kind == "independent":
        made = {"weights": torch.zeros(heads, layers, hidden, hidden), "biases": torch.zeros(heads, layers, hidden)}
    else:
        own = 1 if shape.shared else heads
        made = {
            "states": normal(own, layers, double, hidden),
            "tokens": normal(own, double, width or hidden),
            "outs": torch.zeros(own, layers, hidden, shape.inner),
            "biases": torch.zeros(heads, layers, double),
        }
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def forward(kind: str, weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor) -> Tensor:
    """(heads, n, hidden): what goes into the LM head, from hidden (n, hidden) and tokens (heads, n, width).

    tokens[k] is what is seen of the token that stands before what head k drafts.
    """
    return (_independent if kind == "independent" else _sequential)(weights, hidden, tokens)


def _independent(weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor) -> Tensor:
    import torch
    from torch.nn.functional import silu

    states = hidden.float().expand(len(weights["weights"]), -1, -1)
    dtype = hidden.dtype
    for block in range(weights["weights"].shape[1]):
        matrix = weights["weights"][:, block].to(dtype).transpose(1, 2)
        moved = torch.bmm(states.to(dtype), matrix).float() + weights["biases"][:, block, None]
        states = states + silu(moved)
    return states


def _sequential(weights: dict[str, Tensor], hidden: Tensor, tokens: Tensor) -> Tensor:
    import torch
    from torch.nn.functional import linear, rms_norm, silu

    states, dtype, size = hidden.float(), hidden.dtype, hidden.shape[-1:]
    lowered: dict[str, Any] = {name: tensor.to(dtype) for name, tensor in weights.items() if name != "biases"}
    given = []
    for head, token in enumerate(tokens):
        own = min(head, len(weights["states"]) - 1)
        for layer in range(weights["states"].shape[1]):
            both = linear(rms_norm(states, size, eps=EPS).to(dtype), lowered["states"][own, layer])
            if layer == 0:
                both = both + linear(token, lowered["tokens"][own])
            gate, up = (both.float() + weights["biases"][head, layer]).chunk(2, -1)
            states = states + linear((silu(gate) * up).to(dtype), lowered["outs"][own, layer]).float()
        given.append(states)
    return torch.stack(given)


def short_form(states: Tensor, head: Tensor, rank: int) -> dict[str, Tensor]:
    """narrow (rank, hidden), widen (hidden, rank) such that head @ widen @ narrow @ state is nearest to head @ state.

    Nearest in the mean square over states (n, hidden), what heads put into the LM head (candidates, hidden): the best
    approximation of rank `rank` by Eckart and Young, in coordinates in which the states are white.
    """
    import torch

    spread = states.double().T @ states.double() / len(states)
    values, vectors = torch.linalg.eigh(spread)
    root = values.clamp(min=float(values[-1]) * 1e-9).sqrt()
    whiten, colour = vectors / root @ vectors.T, vectors * root @ vectors.T  # symmetric: inverses of each other
    centred = head.double() - head.double().mean(0)  # what all logits share decides nothing
    seen = colour @ (centred.T @ centred) @ colour
    directions = torch.linalg.eigh(seen).eigenvectors[:, -rank:]
    return {"narrow": (directions.T @ whiten).float(), "widen": (colour @ directions).float()}
