"""The model's own choice at every row of a verification, by the engine's own sampler.

Each row is sampled by the parameters of its request, as if a plain decode had come to it. A draft is a function of what
stands before it, so keeping it where it equals that choice keeps the distribution of what is generated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from chunkllm_bridge.sglang.verify import Accepted, Shape

PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
"""Fields of `SamplingBatchInfo` that the sampler reads row by row, (requests, ...)."""


def must_go_singly(request: Any) -> bool:
    """Whether what this request may say next depends on the tokens before it in a way that only a plain decode keeps:
    its penalties count them, its own processor may read them."""
    params = request.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
        or request.custom_logit_processor
    )


def has_single(info: Any) -> bool:
    """Whether any request of the batch may be one of those (`SamplingBatchInfo` of a forward)."""
    return (
        info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or bool(info.has_custom_logit_processor)
    )


def choose(runner: Any, batch: Any, output: Any, shape: Shape, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
    """(requests, rows) int64: the model's tokens. `output.next_token_logits` (requests * rows, vocabulary) is used up,
    and log-probabilities are written to `output` where they are asked for, a row each.

    `tokens` (requests * rows,) are those that were verified, `positions` (requests * rows,) where they stand.
    """
    info, logits, rows = batch.sampling_info, output.next_token_logits, shape.rows
    requests = len(batch.reqs)
    bias(batch, logits.view(requests, rows, -1), shape, tokens)
    if not info.is_all_greedy:
        info = dataclasses.replace(
            info,
            **{name: repeated(getattr(info, name), rows) for name in PER_REQUEST},
            has_custom_logit_processor=False,  # done, like all that changes logits
        )
    elif info.has_custom_logit_processor:
        info = dataclasses.replace(info, has_custom_logit_processor=False)
    chosen = runner.sampler(
        output,
        info,
        batch.return_logprob,
        [count for count in batch.top_logprobs_nums or () for _ in range(rows)],
        [ids for ids in batch.token_ids_logprobs or () for _ in range(rows)],
        positions,
    ).long()
    group = get_parallel().tp_group
    if group.world_size > 1 and not info.is_all_greedy:
        group.broadcast(chosen, src=0)  # a draw may differ where logits do in their last bit
    return chosen.view(requests, rows)


def bias(batch: Any, logits: torch.Tensor, shape: Shape, tokens: torch.Tensor) -> None:
    """What the engine does to logits before it samples, in its order; `logits` (requests, rows, vocabulary)."""
    info, rows, flat = batch.sampling_info, shape.rows, logits.view(-1, logits.shape[-1])
    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties[:, None])
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(flat, repeated(info.acc_scaling_penalties, rows))
    if batch.has_grammar and (mask := grammar_mask(batch, shape, tokens)) is not None:
        mask.apply(flat)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[:, None])
    if info.has_custom_logit_processor:  # of requests that accept no drafts: their first row is all that counts
        first = logits[:, 0].contiguous()
        apply_custom_logit_processor(first, info)
        logits[:, 0] = first


def grammar_mask(batch: Any, shape: Shape, tokens: torch.Tensor) -> Any:
    """What each row's grammar allows there: the requests' grammars are led along the drafts and back."""
    requests = len(batch.reqs)
    tree = GrammarTree.from_host(
        shape.next_token.expand(requests, -1),
        shape.next_sibling.expand(requests, -1),
        tokens.view(requests, -1).cpu(),
    )
    return build_grammar_vocab_mask(
        reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=tokens.device, barrier=None
    )


def repeated(values: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if values is None else values.repeat_interleave(rows, 0)


def arrange_logprobs(output: Any, accepted: Accepted, rows: int, *, wanted: bool) -> None:
    """Log-probabilities as results are read: (requests, longest path), and flat lists in the same order."""
    if not wanted:
        return
    output.next_token_logprobs = output.next_token_logprobs.view(-1, rows)
    if accepted.paths is None:
        return
    output.next_token_logprobs = output.next_token_logprobs.gather(1, accepted.paths)
    first = torch.arange(len(accepted.paths), device=accepted.paths.device)[:, None] * rows
    order = (first + accepted.paths).flatten().tolist()
    for name in ("next_token_top_logprobs", "next_token_token_ids_logprobs"):
        for part in (f"{name}_val", f"{name}_idx"):
            if found := getattr(output, part, None):
                setattr(output, part, [found[row] for row in order])
