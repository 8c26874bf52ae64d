"""Attention for decoding large batches on a CPU: grouped heads share their keys instead of copying them.

transformers' SDPA path repeats every KV head for the query heads that share it; with a hundred sequences in a batch
that copying costs more than the model's matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "chunkllm_grouped"
PLAIN = frozenset({"llama", "qwen2", "qwen3", "mistral"})  # nothing but scale and mask between the products


@contextmanager
def grouped(model: Any) -> Iterator[None]:
    """While inside, a plain model on a CPU decodes with shared keys; others are left as they are."""
    config = model.config
    if model.device.type != "cpu" or config.model_type not in PLAIN or getattr(config, "sliding_window", None):
        yield
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Any, None]:
    """query (rows, heads, queries, size), key and value (rows, kv_heads, length, size)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    rows, heads, queries, size = query.shape
    if queries > 1:
        output: tuple[Any, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = (grouped @ key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:  # (rows, 1, 1, length) bool
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    states = scores.softmax(-1).to(value.dtype) @ value
    return states.reshape(rows, 1, heads, size), None
