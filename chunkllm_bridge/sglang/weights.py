"""SGLang's loaded model as plugins may look into it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from chunkllm_bridge.common.rows import Kinds, Rows


class Weights(Rows):
    """Over a model runner of SGLang."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.model_config.hf_text_config.to_dict(), runner.dtype, torch.device(runner.device))
        self._runner = runner

    def kinds(self) -> Kinds:
        from sglang.srt.layers import vocab_parallel_embedding as engine
        from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

        return Kinds(engine.VocabParallelEmbedding, engine.ParallelLMHead, UnquantizedEmbeddingMethod)

    def modules(self) -> Iterable[Any]:
        found: Iterable[Any] = self._runner.model.modules()
        return found
