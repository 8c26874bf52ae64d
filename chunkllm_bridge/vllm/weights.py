"""vLLM's loaded model as plugins may look into it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chunkllm_bridge.common.rows import Kinds, Rows


class Weights(Rows):
    """Over a model runner of vLLM."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.model_config.hf_text_config.to_dict(), runner.model_config.dtype, runner.device)
        self._runner = runner

    def kinds(self) -> Kinds:
        from vllm.model_executor.layers import vocab_parallel_embedding as engine

        return Kinds(engine.VocabParallelEmbedding, engine.ParallelLMHead, engine.UnquantizedEmbeddingMethod)

    def modules(self) -> Iterable[Any]:
        found: Iterable[Any] = self._runner.get_model().modules()
        return found
