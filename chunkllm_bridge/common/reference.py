"""Plain-torch attention, verification and FP8: the oracle that adapters are tested against.

Clear, not fast. Everything is computed in float32, whatever the inputs are stored in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .quota import pages_for

E4M3_MAX = 448.0  # the largest finite float8_e4m3fn


def paged_attention(
    query: Tensor,  # (tokens, heads, head_size), the requests of the batch one after the other
    key_cache: Tensor,  # (blocks, block_size, kv_heads, head_size), any strides; this step's keys already written
    value_cache: Tensor,  # as key_cache
    block_table: Tensor,  # (requests, max_blocks) integers; entries beyond a request's length are never read
    query_start_loc: Tensor,  # (requests + 1,) integers: request i has the rows [i] to [i + 1] of query
    seq_lens: Tensor,  # (requests,) integers: tokens in the cache, this step's included
    scale: float,
    *,
    sliding_window: int | None = None,  # each token sees the last so many, itself included
) -> Tensor:
    """Causal attention over a paged cache, prefill chunks and decodes mixed; returns query's shape and dtype.

    Heads are grouped: `heads / kv_heads` neighbours share a KV head. Rows of query that belong to no request are 0.
    """
    output = torch.zeros_like(query)
    heads_per_kv = query.shape[1] // key_cache.shape[2]
    bounds = query_start_loc.tolist()
    for table, length, first, last in zip(block_table, seq_lens.tolist(), bounds[:-1], bounds[1:], strict=True):
        keys = _gather(key_cache, table, length).repeat_interleave(heads_per_kv, dim=1)
        values = _gather(value_cache, table, length).repeat_interleave(heads_per_kv, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys) * scale
        position = torch.arange(length, device=query.device)  # (length,)
        own = position[length - (last - first) :, None]  # (queries, 1): the newest tokens ask
        visible = position <= own
        if sliding_window is not None:
            visible &= position > own - sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        output[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(output.dtype)
    return output


def write_kv(
    key: Tensor,  # (tokens, kv_heads, head_size)
    value: Tensor,  # as key
    key_cache: Tensor,  # (blocks, block_size, kv_heads, head_size), any strides; written in place
    value_cache: Tensor,  # as key_cache
    slot_mapping: Tensor,  # (tokens,) integers: block * block_size + offset, negative for padding
) -> None:
    """Put each token's key and value into its slot."""
    real = slot_mapping >= 0
    slots = slot_mapping[real].long()
    block_size = key_cache.shape[1]
    where = slots // block_size, slots % block_size
    key_cache[where] = key[real].to(key_cache.dtype)
    value_cache[where] = value[real].to(value_cache.dtype)


def verify_chain(
    draft_tokens: Sequence[int],  # k drafts, each following the one before
    target_logits: Tensor,  # (k + 1, vocab): row i is the target's opinion after i drafts
    *,
    temperature: float,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,  # (k + 1, 2) in [0, 1): to accept, to draw; in place of the generator
    draft_probs: Tensor | None = None,  # (k, vocab) that the drafts were drawn from; None: they were certain
) -> list[int]:
    """What a speculative step emits: the accepted drafts and one token of the target's own, so 1 to k + 1 tokens.

    At temperature 0 the longest prefix that the target would have picked too. Above it exact rejection sampling
    (Leviathan et al., arXiv 2211.17192): the tokens are distributed as if the target had drawn them one by one.
    """
    if temperature == 0:
        picks: list[int] = target_logits.float().argmax(dim=-1).tolist()
        accepted = next((i for i, draft in enumerate(draft_tokens) if draft != picks[i]), len(draft_tokens))
        return picks[: accepted + 1]
    target = (target_logits.float() / temperature).softmax(dim=-1)
    if uniforms is None:
        uniforms = torch.rand(len(target), 2, generator=generator)
    chances: list[list[float]] = uniforms.tolist()
    for i, draft in enumerate(draft_tokens):
        if draft_probs is None:
            proposal = torch.zeros_like(target[i])
            proposal[draft] = 1.0
        else:
            proposal = draft_probs[i].float()
        if chances[i][0] * proposal[draft] >= target[i, draft]:  # kept with min(1, target / proposal)
            residual = (target[i] - proposal).clamp(min=0)
            if not residual.any():  # target and proposal differ by rounding only
                residual = target[i]
            return [*draft_tokens[:i], _draw(residual, chances[i][1])]
    return [*draft_tokens, _draw(target[-1], chances[-1][1])]


def verify_tree(
    draft_tokens: Sequence[int],  # a token per node
    parents: Sequence[int],  # each node's parent, which stands before it; -1 = the root
    target_logits: Tensor,  # (nodes + 1, vocab): row 0 is the target's opinion at the root, row i + 1 after node i
    *,
    temperature: float,
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,  # (nodes + 1, 2) in [0, 1): row i to accept node i, and to draw after node i - 1
) -> tuple[list[int], list[int]]:
    """What a step that verifies a tree emits, and the accepted nodes: a path from the root, and one token after it.

    The drafts were certain. At temperature 0 the path on which the target would have picked each token too. Above it
    siblings are tried one after the other, each against what the ones before left of the target (SpecInfer, arXiv
    2305.09781): the tokens are distributed as if the target had drawn them one by one. For a tree that is a chain it is
    `verify_chain`, with the same uniforms.
    """
    path: list[int] = []
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    if uniforms is None:
        uniforms = torch.rand(len(target_logits), 2, generator=generator)
    chances: list[list[float]] = uniforms.tolist()
    at = -1
    while True:
        logits = target_logits[at + 1].float()
        if temperature == 0:
            token = int(logits.argmax())
            taken = next((node for node in children.get(at, ()) if draft_tokens[node] == token), None)
        else:
            left = (logits / temperature).softmax(dim=-1)
            taken = None
            for node in children.get(at, ()):
                share = left[draft_tokens[node]] / left.sum()
                if chances[node][0] < share:
                    taken = node
                    break
                rest = left.index_fill(0, torch.tensor(draft_tokens[node], device=left.device), 0.0)
                if rest.any():  # else target and draft differ by rounding only
                    left = rest
            token = 0 if taken is not None else _draw(left, chances[at + 1][1])
        if taken is None:
            return [*(draft_tokens[node] for node in path), token], path
        path.append(taken)
        at = taken


def fp8_round(x: Tensor, *, axis: int) -> tuple[Tensor, Tensor]:
    """Quantise with one scale per index of `axis`, the channel axis: the largest value of a channel becomes 448.

    Returns values, (x.shape) float8_e4m3fn rounded to the nearest, and scale, float32, of size 1 in all other axes.
    """
    others = [i for i in range(x.dim()) if i != axis % x.dim()]
    scale = x.float().abs().amax(dim=others, keepdim=True) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)  # a channel of zeros stays zeros
    values = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values, scale


def fp8_dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 numbers that `fp8_round` stands for."""
    return e4m3_decode(values.view(torch.uint8)) * scale


def e4m3_decode(codes: Tensor) -> Tensor:
    """uint8 codes to float32, from the definition (OCP 8-bit floating point, E4M3): s eeee mmm with a bias of 7.

    No infinities; all ones is NaN; an exponent of 0 is subnormal.
    """
    bits = codes.to(torch.int32)
    exponent = (bits >> 3) & 0xF
    mantissa = (bits & 0x7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    magnitude = torch.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return torch.where(bits >= 0x80, -magnitude, magnitude)


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """(length, kv_heads, head_size) float32: one request's tokens in order."""
    blocks = table[: pages_for(length, cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:length].float()


def _draw(weights: Tensor, uniform: float) -> int:
    """The index at which the running sum of weights passes its `uniform` share; never one of weight 0."""
    reached = weights.cpu().double().cumsum(dim=0)  # in double a uniform below 1 never reaches the whole sum
    return int(torch.searchsorted(reached, uniform * reached[-1], right=True))
