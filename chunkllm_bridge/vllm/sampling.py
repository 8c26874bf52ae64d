"""How vLLM samples beside drafts, put right where its code for CPUs is wrong (found in 0.32.0)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch


def wrap_sample(runner: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`GPUModelRunner._sample` with two cases taken out of the rejection sampler.

    A step without drafts goes the plain way, as without speculation: the rejection sampler would work on no rows, which
    costs time, and on CPUs fails where a request has a top_k. And the drafts with which vLLM pads a request that joins
    (they are all -1) are left out: the CPU kernel takes them for indices.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sample(logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
            metadata = spec_decode_metadata
            if metadata is None or not any(metadata.num_draft_tokens):
                return original(logits, None)
            padded = [index for index, ids in enumerate(runner.input_batch.spec_token_ids) if -1 in ids]
            if not padded or runner.device.type != "cpu":
                return original(logits, metadata)
            with no_drafts(runner.input_batch.spec_token_ids, padded):
                less = without(metadata, padded)
                if any(less.num_draft_tokens):
                    return original(logits, less)
                return original(logits[less.bonus_logits_indices], None)

        return sample

    return wrap


@contextlib.contextmanager
def no_drafts(drafts: list[list[int]], requests: Sequence[int]) -> Iterator[None]:
    """What the samplers see of these requests' drafts: none."""
    before = [drafts[request] for request in requests]
    for request in requests:
        drafts[request] = []
    try:
        yield
    finally:
        for request, tokens in zip(requests, before, strict=True):
            drafts[request] = tokens


def without(metadata: Any, requests: Sequence[int]) -> Any:
    """A `SpecDecodeMetadata` in which these requests of the batch have no drafts; the logits keep their rows."""
    counts: list[int] = list(metadata.num_draft_tokens)
    device = metadata.draft_token_ids.device
    owners = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
    kept = ~torch.isin(owners, torch.tensor(requests, device=device))
    bonus = metadata.bonus_logits_indices.clone()
    for request in requests:
        bonus[request] -= counts[request]  # its first row, which follows its last real token
        counts[request] = 0
    return replace(
        metadata,
        draft_token_ids=metadata.draft_token_ids[kept].contiguous(),
        num_draft_tokens=counts,
        cu_num_draft_tokens=torch.tensor(counts, device=device).cumsum(0).to(metadata.cu_num_draft_tokens.dtype),
        target_logits_indices=metadata.target_logits_indices[kept],
        bonus_logits_indices=bonus,
    )


def wrap_expand(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`rejection_sampler.expand_batch_to_tokens` for CPUs: each request's value, once per draft token.

    vLLM's own kernel there writes into an int64 copy of its result: what the drafts' logits were divided by is whatever
    lay in memory, so sampling with drafts had no temperature, top-k or top-p of its own.
    """

    @functools.wraps(original)
    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)

    return expand_batch_to_tokens
