"""The worker of our speculative algorithm: SGLang's own forward passes, with drafts verified in them.

SGLang makes it before anything is attached. It decodes plainly, by the engine's plain forward and sampler, until a
`DraftsBridge` is connected, and in every step for which that has no drafts.

What a request carries from step to step is its newest token, which has no KV yet, and the hidden state that gave it.
KV slots for two steps lie reserved beyond its end: what rejected drafts wrote there is overwritten by the next step.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardMode,
    get_server_return_hidden_states_mode,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from chunkllm_bridge.common.fitting import Drafts
from chunkllm_bridge.sglang import sampling
from chunkllm_bridge.sglang.drafts import DraftsBridge
from chunkllm_bridge.sglang.verify import Shape, accept, full_masks, shape_of


class Carried(SpecInput):  # type: ignore[misc]  # an engine is Any to us
    """What the requests of a batch carry to their next step. In overlap SGLang relays both by `future_indices`."""

    topk_p = topk_index = draft_probs = None
    future_indices: Any = None

    def __init__(self, bonus_tokens: torch.Tensor, hidden_states: torch.Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens  # (requests,) int64
        self.hidden_states = hidden_states  # (requests, hidden_size)

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.hidden_states = self.hidden_states[new_indices]

    def merge_batch(self, other: Carried) -> None:
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.hidden_states = torch.cat([self.hidden_states, other.hidden_states])


class Verification(NgramVerifyInput):  # type: ignore[misc]
    """Rows that are verified together. `custom_mask` is for backends of SGLang's own; ours reads `tree`."""

    def __init__(self, shape: Shape, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> None:
        super().__init__(
            draft_token=tokens, positions=positions, draft_token_num=shape.rows, new_seq_lens=lengths, custom_mask=None
        )
        self.tree = shape.sees  # (rows, rows) bool, or None for a chain


class Worker(BaseSpecWorker):  # type: ignore[misc]
    """Holds no model of its own; `draft_worker` is None."""

    draft_worker = None

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self.server_args, self._target_worker = server_args, target_worker
        self.model_runner = target_worker.model_runner
        self.device = torch.device(self.model_runner.device)
        spec = get_spec()
        self.speculative_num_draft_tokens = int(spec.speculative_num_draft_tokens)
        self.speculative_num_steps, self.topk = int(spec.speculative_num_steps), int(spec.speculative_eagle_topk)
        self._last_place = int(self.model_runner.model_config.context_len) - 1
        self.bridge: DraftsBridge | None = None

    # ---- SGLang's hooks ----

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None, **kwargs: Any
    ) -> GenerationBatchResult:
        """SGLang puts the batch's fields back after each call; what is returned is all that counts."""
        bridge = self.bridge
        if not batch.forward_mode.is_decode():
            if bridge is not None:
                bridge.interrupt()
            return self._prefill(batch, on_publish)
        drafts = None if bridge is None else bridge.propose(batch, self.speculative_num_draft_tokens - 1)
        result = self._decode(batch, on_publish) if drafts is None else self._verify(batch, drafts, on_publish)
        if bridge is not None:
            bridge.verifying(batch, drafts, result)
        return result

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """A step's result is being read, in the order of the steps."""
        if self.bridge is not None:
            self.bridge.verified(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self.bridge is not None:
            self.bridge.finished(rid)

    # ---- steps ----

    def _capture(self, batch: Any, least: CaptureHiddenMode) -> CaptureHiddenMode:
        """What is needed here, or more where a request wants its hidden states."""
        return max(least, batch.return_hidden_states_mode, get_server_return_hidden_states_mode())

    def _prefill(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """A prefill, or a mixed batch whose decoding requests go on by a token each."""
        mode = self._capture(batch, CaptureHiddenMode.LAST)
        result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=mode)
        hidden = result.logits_output.hidden_states
        if mode == CaptureHiddenMode.FULL:
            ends = torch.tensor(batch.extend_lens, device=hidden.device).cumsum(0) - 1
            hidden = hidden[ends]
        lengths = batch.seq_lens.clone()
        return self._done(result, result.next_token_ids, None, lengths, result.next_token_ids, hidden, 1, on_publish)

    def _decode(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """The engine's plain decode, one row per request."""
        carried, lengths = batch.spec_info, batch.seq_lens
        batch.input_ids = carried.bonus_tokens
        batch.out_cache_loc = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, lengths].long()
        batch.seq_lens = lengths + 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = None  # the engine adds up anew
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.spec_info = None
        longer = batch.seq_lens
        mode = self._capture(batch, CaptureHiddenMode.LAST)
        result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=mode)
        output = result.logits_output
        if batch.return_logprob:
            output.next_token_logprobs = output.next_token_logprobs.view(-1, 1)
        tokens = result.next_token_ids
        return self._done(result, tokens, None, longer, tokens, output.hidden_states, 1, on_publish)

    def _verify(self, batch: Any, drafts: Drafts, on_publish: Any) -> GenerationBatchResult:
        """One forward over each request's newest token and drafts; the drafts that the model agrees with stay."""
        carried, lengths = batch.spec_info, batch.seq_lens
        shape = shape_of(drafts.tokens.shape[1], drafts.parents, self.device)
        rows, requests = shape.rows, len(batch.reqs)
        tokens = torch.cat([carried.bonus_tokens[:, None], drafts.tokens.clamp(min=0)], 1).flatten()
        slots = lengths[:, None] + torch.arange(rows, device=self.device)
        positions = (lengths[:, None] + shape.depth).clamp(max=self._last_place).flatten()
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens
        batch.out_cache_loc = (
            batch.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], slots].flatten().long()
        )
        batch.spec_info = Verification(shape, tokens, positions, lengths)
        if self.device.type != "cpu":
            batch.spec_info.custom_mask = full_masks(shape, batch.seq_lens_cpu.tolist(), self.device)
        result = self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        output = result.logits_output
        chosen = sampling.choose(self.model_runner, batch, output, shape, tokens, positions)
        accepted = accept(shape, drafts.tokens, chosen)
        longer = lengths + accepted.counts + 1
        hidden = output.hidden_states.view(requests, rows, -1)
        every = torch.arange(requests, device=self.device)
        sampling.arrange_logprobs(output, accepted, rows, wanted=batch.return_logprob)
        emitted = chosen
        if accepted.paths is not None:
            emitted = chosen.gather(1, accepted.paths)
            self._gather_path(batch, accepted.paths, rows)
            if batch.return_hidden_states:
                output.hidden_states = hidden[every[:, None], accepted.paths].flatten(0, 1)
        newest, state = chosen[every, accepted.last], hidden[every, accepted.last]
        return self._done(result, emitted, accepted.counts, longer, newest, state, emitted.shape[1], on_publish)

    def _gather_path(self, batch: Any, paths: torch.Tensor, rows: int) -> None:
        """Move the accepted path's KV to the front of the verified slots, where the request goes on."""
        slots = batch.out_cache_loc.view(-1, rows)
        to, found = slots[:, : paths.shape[1]].flatten(), slots.gather(1, paths).flatten()
        if self.device.type == "cpu":
            moved = to != found
            to, found = to[moved], found[moved]
            if not len(to):
                return
        batch.token_to_kv_pool_allocator.get_kvcache().move_kv_cache(to, found)

    def _done(
        self,
        result: GenerationBatchResult,
        emitted: torch.Tensor,  # (requests, stride) or (requests,): tokens, of which the accepted and one more count
        counts: torch.Tensor | None,  # (requests,) accepted drafts; None: there were none
        lengths: torch.Tensor,  # (requests,) int64 tokens with KV
        newest: torch.Tensor,  # (requests,)
        hidden: torch.Tensor,  # (requests, hidden_size) that gave the newest
        stride: int,
        on_publish: Any,
    ) -> GenerationBatchResult:
        if on_publish is not None:
            on_publish(lengths)
        ones = torch.ones(len(lengths), dtype=torch.int32, device=self.device)
        result.next_token_ids = emitted.flatten()
        result.accept_lens = ones if counts is None else (counts + 1).to(torch.int32)
        result.new_seq_lens = lengths
        result.next_draft_input = Carried(newest.long(), hidden)
        result.speculative_num_draft_tokens = self.speculative_num_draft_tokens
        result.speculative_output_stride = stride
        return result
