"""SGLang's torch_native attention with one call per layer for a whole batch, its indices and mask made once per step.

Serves decode and speculative verification (the same number of query rows for each request), and prefill per request
without the padded query of the stock backend. What it does not know (sliding windows, cross attention, encoders) runs
as in the stock backend.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

WASTE = 4  # a batch padded to more than so many times its tokens is served per request


class Even(NamedTuple):
    """A batch in which every request asks with the same number of rows."""

    slots: torch.Tensor  # (requests * longest,) int64, into the pool; beyond a request's end its own first slot
    mask: torch.Tensor  # (requests, 1, rows, longest) bool, True where a row may look
    longest: int
    added: dict[Any, torch.Tensor | None]  # (group, dtype) -> the mask as attention adds it, made in the first layer

    def mask_for(self, group: int, dtype: Any) -> torch.Tensor | None:
        """(requests, 1, group * rows, longest): 0 where a row may look, else -inf; None: each sees everything."""
        if (group, dtype) not in self.added:
            mask = None
            if not self.mask.all():
                mask = self.mask.new_zeros(self.mask.shape, dtype=dtype).masked_fill_(~self.mask, float("-inf"))
                mask = mask.repeat(1, 1, group, 1)
            self.added[group, dtype] = mask
        return self.added[group, dtype]


class Span(NamedTuple):
    """One request of a prefill."""

    start: int  # of its rows in the batch
    end: int
    slots: torch.Tensor  # (prefix + rows,) int64
    mask: torch.Tensor | None  # (rows, prefix + rows) bool; None: plainly causal, no prefix


@functools.cache
def backend_class() -> Any:
    """The class, once the engine's own can be imported."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    attend = torch.nn.functional.scaled_dot_product_attention

    class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        plan: Even | list[Span] | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self.plan = None
            mode = forward_batch.forward_mode
            if forward_batch.encoder_lens is not None or mode.is_idle():
                return
            if mode.is_target_verify():
                self.plan = self._verified(forward_batch)
            elif mode.is_decode():
                self.plan = self._even(forward_batch, 1, None)
            elif mode.is_extend() and forward_batch.extend_seq_lens is not None:
                self.plan = self._spans(forward_batch)

        def _verified(self, batch: Any) -> Even | None:
            info = batch.spec_info
            flat, tree = getattr(info, "custom_mask", None), getattr(info, "tree", None)
            return self._even(batch, info.draft_token_num, flat, waste=None, tree=tree)

        def _even(
            self, batch: Any, rows: int, custom: Any, waste: int | None = WASTE, tree: torch.Tensor | None = None
        ) -> Even | None:
            """`custom`: the requests' (rows, length) masks one after the other, flat, as SGLang's tree masks are.
            `tree`: (rows, rows) bool, which of its request's own rows each sees; the same for all requests."""
            lens = batch.seq_lens + (rows if batch.forward_mode.is_target_verify() else 0)
            longest, requests = int(lens.max()), lens.shape[0]
            if waste is not None and requests * longest > waste * int(lens.sum()) + 1024:
                return None
            steps = torch.arange(longest)
            last = (lens[:, None] - rows + torch.arange(rows))[:, :, None]  # (requests, rows, 1): the row's own place
            mask = steps <= last
            if tree is not None:
                own = steps - (lens[:, None] - rows)  # (requests, longest): the row that stands there; negative before
                mask = (own < 0)[:, None] | (tree[:, own.clamp(0, rows - 1)].transpose(0, 1) & mask[:, -1:])
            if custom is not None:
                start = 0
                for index, length in enumerate(lens.tolist()):
                    mask[index, :, :length] = custom[start : start + rows * length].view(rows, length)
                    start += rows * length
            table = self.req_to_token_pool.req_to_token[batch.req_pool_indices, :longest]
            slots = table.where(steps < lens[:, None], table[:, :1])
            return Even(slots.flatten().long(), mask.unsqueeze(1), longest, {})

        def _spans(self, batch: Any) -> list[Span]:
            table = self.req_to_token_pool.req_to_token
            spans, start = [], 0
            pools, lens = batch.req_pool_indices.tolist(), batch.extend_seq_lens.tolist()
            for pool, rows, prefix in zip(pools, lens, batch.extend_prefix_lens.tolist(), strict=True):
                mask = torch.ones(rows, prefix + rows, dtype=torch.bool).tril_(prefix) if prefix else None
                spans.append(Span(start, start + rows, table[pool, : prefix + rows].long(), mask))
                start += rows
            return spans

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Any:
            plan = self.plan
            if not isinstance(plan, Even) or not _plain(layer):
                return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return self._forward_even(plan, q, k, v, layer, forward_batch, save_kv_cache)

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> Any:
            plan = self.plan
            if plan is None or not _plain(layer):
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            if isinstance(plan, Even):
                return self._forward_even(plan, q, k, v, layer, forward_batch, save_kv_cache)
            keys, values = self._stored(k, v, layer, forward_batch, save_kv_cache)
            heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            out = q.new_empty(heads.shape[0], layer.tp_q_head_num, layer.v_head_dim)
            for span in plan:
                out[span.start : span.end] = attend(
                    heads[span.start : span.end].transpose(0, 1).unsqueeze(0),
                    keys.index_select(0, span.slots).to(q.dtype).transpose(0, 1).unsqueeze(0),
                    values.index_select(0, span.slots).to(q.dtype).transpose(0, 1).unsqueeze(0),
                    attn_mask=span.mask,
                    is_causal=span.mask is None,
                    scale=layer.scaling,
                    enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                )[0].transpose(0, 1)
            return out.view(out.shape[0], -1)

        def _forward_even(self, plan: Even, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool) -> Any:
            """Heads that share a KV head stand as its rows: q (requests, kv_heads, group * rows, head_dim)."""
            keys, values = self._stored(k, v, layer, batch, save)
            requests, _, rows, longest = plan.mask.shape
            kv_heads, dim = layer.tp_k_head_num, layer.qk_head_dim
            group = layer.tp_q_head_num // kv_heads
            heads = q.reshape(requests, rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
            out = attend(
                heads.reshape(requests, kv_heads, group * rows, dim),
                keys.index_select(0, plan.slots).to(q.dtype).view(requests, longest, kv_heads, dim).transpose(1, 2),
                values.index_select(0, plan.slots).to(q.dtype).view(requests, longest, kv_heads, -1).transpose(1, 2),
                attn_mask=plan.mask_for(group if rows > 1 else 1, q.dtype),
                scale=layer.scaling,
            )
            out = out.view(requests, kv_heads, group, rows, -1).permute(0, 3, 1, 2, 4)
            return out.reshape(requests * rows, -1)

        def _stored(self, k: Any, v: Any, layer: Any, batch: Any, save: bool) -> tuple[Any, Any]:
            """The layer's keys and values, (slots, kv_heads, head_dim), after this step's are written."""
            if save and k is not None:
                where = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
                self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
            return self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.token_to_kv_pool.get_value_buffer(
                layer.layer_id
            )

    def _plain(layer: Any) -> bool:
        return (
            not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER and layer.sliding_window_size < 0
        )

    return BatchedAttention
