"""Draft heads for the fake engine's model: of the right shape, and of no use."""

from __future__ import annotations

from pathlib import Path

import torch

from chunkllm_bridge.common.fake import HIDDEN, VOCAB
from chunkllm_bridge.common.fake_model import FakeModel
from chunkllm_bridge.plugins.medusa import formats


def write(path: Path, *, heads: int = 5, kind: str = "independent", candidates: int = 64) -> Path:
    """A file in our own layout; the draft vocabulary is every so many-th token."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 4

    tensors = {"vocabulary": torch.arange(candidates) * (VOCAB // candidates)}
    if kind == "independent":
        tensors |= {"weights": noise(heads, 1, HIDDEN, HIDDEN), "biases": noise(heads, 1, HIDDEN)}
    else:
        inner = 2 * HIDDEN
        tensors |= {
            "states": noise(1, 1, 2 * inner, HIDDEN),
            "tokens": noise(1, 2 * inner, HIDDEN),
            "outs": noise(1, 1, HIDDEN, inner),
            "biases": noise(heads, 1, 2 * inner),
            "narrow": noise(4, HIDDEN),
            "widen": noise(HIDDEN, 4),
        }
    base = {"fingerprint": formats.fingerprint(FakeModel()), "name": "hash"}
    formats.write(path, kind, tensors, base, {})
    return path
