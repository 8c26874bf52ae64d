"""The loaded model as plugins may look into it: its config, and whole rows of its two vocabulary matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

CHUNK = 16_384
"""Rows that are fetched at once: what is copied twice stays small beside the answer."""


class Weights:
    """The `Model` of `Preparation`, over a vLLM model runner. Borrows the layers, answers with copies."""

    def __init__(self, runner: Any) -> None:
        self.config: Mapping[str, Any] = runner.model_config.hf_text_config.to_dict()
        self.dtype: torch.dtype = runner.model_config.dtype
        self.device: torch.device = runner.device
        self._runner = runner

    def rows(self, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        """(len(ids) or vocab_size, hidden_size). With tensor parallelism one exchange: every rank asks for the same.

        Raises `KeyError` for other names, and where the model has no such matrix or keeps it in another form.
        """
        layer = self._layer(name)
        if ids is None:
            ids = torch.arange(self.config["vocab_size"])
        ids = ids.to(device=self.device, dtype=torch.long).flatten()
        with torch.no_grad():
            return torch.cat([self._look_up(layer, some) for some in torch.split(ids, CHUNK)])

    def _look_up(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        # a head's own forward refuses to look rows up, though its weights are laid out as an embedding's
        found: torch.Tensor = VocabParallelEmbedding.forward(layer, ids)
        return found.clone() if found.data_ptr() == layer.weight.data_ptr() else found

    def _layer(self, name: str) -> Any:
        if name not in ("embedding", "lm_head"):
            raise KeyError(f"{name!r} (known: embedding, lm_head)")
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            UnquantizedEmbeddingMethod,
            VocabParallelEmbedding,
        )

        vocab, hidden = self.config["vocab_size"], self.config["hidden_size"]
        found = [
            module
            for module in self._runner.get_model().modules()
            if isinstance(module, VocabParallelEmbedding)
            and (module.org_vocab_size, module.embedding_dim) == (vocab, hidden)
        ]
        tables = [layer for layer in found if not isinstance(layer, ParallelLMHead)]
        heads = [layer for layer in found if isinstance(layer, ParallelLMHead)]
        layers = (heads or tables) if name == "lm_head" else tables  # a tied head may be the embedding itself
        if not layers:
            raise KeyError(f"{name!r}: the model has no layer of {vocab} x {hidden} for it")
        layer = layers[0]
        if not isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            raise KeyError(f"{name!r}: kept as {type(layer.quant_method).__name__}, not as plain rows")
        return layer
