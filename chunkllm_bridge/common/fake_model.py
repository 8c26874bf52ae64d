"""What a plugin may look into of the fake engine's model: small matrices of numbers that only look random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from chunkllm_bridge.common.fake import HIDDEN, LAYERS, VOCAB

if TYPE_CHECKING:
    import torch

STRIDES = {"embedding": 7919, "lm_head": 104729}  # primes: no two rows alike


class FakeModel:
    """An `abi.Model`. Needs torch."""

    config: Mapping[str, Any]

    def __init__(self) -> None:
        import torch

        self.config = {
            "model_type": "hash",
            "hidden_size": HIDDEN,
            "num_hidden_layers": len(LAYERS),
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": HIDDEN,
            "vocab_size": VOCAB,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def rows(self, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        numbers = torch.arange(VOCAB * HIDDEN) * STRIDES[name] % 65537
        matrix = numbers.reshape(VOCAB, HIDDEN).to(self.dtype) / 65537 - 0.5
        return matrix if ids is None else matrix[ids]


def fake_model() -> FakeModel | None:
    """None where there is no torch: whoever needs a model needs that too."""
    try:
        return FakeModel()
    except ImportError:
        return None
