"""Draft tokens on vLLM's worker: hidden states out of its model runner, drafts into its scheduler.

vLLM verifies chains. It takes the drafts of one worker (the first tensor-parallel rank of the last pipeline stage) and
sends them to all, so only that one asks plugins, and ranks cannot disagree.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkllm_bridge.common.drafts import Drafting
from chunkllm_bridge.patches import vllm as patches
from chunkllm_bridge.vllm.sampling import wrap_expand, wrap_sample

METHOD = "custom_class"
"""What vLLM calls speculation with somebody else's drafts."""


class Proposer:
    """What vLLM makes beside its model runner, before anything is attached. It drafts nothing; `DraftsBridge` does."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, target_model: Any) -> None:
        """The CPU runner calls it without asking whether it is there."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


PROPOSER = f"{Proposer.__module__}.{Proposer.__qualname__}"


def is_ours(speculative: Any) -> bool:
    """Whether a `SpeculativeConfig` of vLLM, or None, takes its drafts from here."""
    return speculative is not None and speculative.method == METHOD and speculative.model == PROPOSER


class DraftsBridge:
    """Between a step's sampling and the next step: tells how the drafts fared, and asks for new ones.

    Nothing of it may reach the step: whatever fails here costs this step's drafts. `asks`: this is the rank whose
    drafts count. All ranks sample, each for itself, so what makes sampling right is put in on all of them.
    """

    def __init__(
        self, runner: Any, drafting: Drafting, *, asks: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.runner, self.drafting, self.asks = runner, drafting, asks
        self._ranks = int(runner.parallel_config.tensor_parallel_size)
        self._clock = clock
        self._last: tuple[tuple[str, ...], float] | None = None  # a step that only decoded: its requests, and when
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        with contextlib.ExitStack() as undo:
            if self.asks:
                undo.callback(patches.PROPOSE.apply_to(self.runner, self._wrap_propose))
                undo.callback(patches.REQUEST_REMOVED.apply_to(self.runner, self._wrap_removed))
            undo.callback(patches.INPUT_FITS.apply_to(self.runner, self._wrap_fits))
            undo.callback(patches.SAMPLE.apply_to(self.runner, wrap_sample(self.runner)))
            if self.runner.device.type == "cpu" and not patches.EXPAND.applied():
                undo.callback(patches.EXPAND.apply(wrap_expand))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Give the runner its own functions back. Idempotent."""
        self._undo.close()

    def interrupt(self) -> None:
        """Something came between two steps: the time from one to the next says nothing."""
        self._last = None

    # ---- the wrapped functions ----

    def _wrap_propose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def propose_draft_token_ids(
            scheduler_output: Any,
            sampled_token_ids: list[list[int]],
            sampling_metadata: Any,
            hidden_states: torch.Tensor,
            sample_hidden_states: torch.Tensor,
            aux_hidden_states: Any,
            spec_decode_metadata: Any,
            *rest: Any,
            **named: Any,
        ) -> Any:
            none = original(
                *(scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states),
                *(aux_hidden_states, spec_decode_metadata, *rest),
                **named,
            )
            try:
                drafts = self._step(scheduler_output, sampled_token_ids, sample_hidden_states, spec_decode_metadata)
            except Exception as error:  # a request must not pay for our mistake either
                self._complain(error)
                return none
            return none if drafts is None else drafts

        return propose_draft_token_ids

    def _wrap_fits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM drafts the token 0 for everybody when one request nears the end; ours are cut request by request."""

        def input_fits_in_drafter(common_attn_metadata: Any) -> bool:
            return common_attn_metadata is not None

        return input_fits_in_drafter

    def _wrap_removed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def on_request_state_removed(req_id: str, *args: Any, **kwargs: Any) -> Any:
            try:
                self.drafting.finished(req_id)
            except Exception as error:
                self._complain(error)
            return original(req_id, *args, **kwargs)

        return on_request_state_removed

    def _complain(self, error: Exception) -> None:
        self._last = None
        self.drafting.failed("step", error)

    # ---- a step ----

    def _step(
        self, scheduled: Any, sampled: list[list[int]], hidden_states: torch.Tensor, metadata: Any
    ) -> list[list[int]] | None:
        """The drafts for the next step, one list per request of the batch; None: nobody drafts.

        `hidden_states` has the rows that logits were made of, (sum of draft tokens + 1 per request, hidden_size).
        """
        now, limit = self._clock(), self.drafting.limit
        rows = [0] * len(sampled) if metadata is None else metadata.num_draft_tokens
        if not limit and not any(rows):
            self._last = None
            return None
        ids = self.runner.input_batch.req_ids
        self._tell(scheduled, ids, sampled, rows, now)
        return self._ask(ids, sampled, rows, hidden_states, limit) if limit else None

    def _tell(
        self, scheduled: Any, ids: Sequence[str], sampled: list[list[int]], rows: Sequence[int], now: float
    ) -> None:
        """How the drafts of this step fared. Prefills are no part of it, and make its time mean nothing."""
        batch, verified = self.runner.input_batch, scheduled.scheduled_spec_decode_tokens
        names, drafted, accepted = [], [], []
        for index, request_id in enumerate(ids):
            decodes = (
                scheduled.num_scheduled_tokens[request_id] == rows[index] + 1
                and batch.num_computed_tokens_cpu[index] >= batch.num_prompt_tokens[index]
            )
            if not decodes or not sampled[index]:
                continue
            drafts = verified.get(request_id, ())
            count = len(drafts) if not drafts or drafts[-1] >= 0 else 0  # -1: vLLM's own padding, no draft
            names.append(request_id)
            drafted.append(count)
            accepted.append(min(count, len(sampled[index]) - 1))
        pure = len(names) == len(ids)
        last, self._last = self._last, (tuple(ids), now) if pure else None
        seconds = now - last[1] if pure and last is not None and last[0] == tuple(ids) else 0.0
        if names:
            self.drafting.verified(names, drafted, accepted, seconds)

    def _ask(
        self, ids: Sequence[str], sampled: list[list[int]], rows: Sequence[int], hidden: torch.Tensor, limit: int
    ) -> list[list[int]] | None:
        """Drafts for the requests whose newest token was sampled in this step and that can take another two."""
        takers, rooms, chosen, row = [], [], [], 0
        for index, tokens in enumerate(sampled):
            room = min(limit, self._room(index, ids[index])) if tokens else 0
            if room > 0:
                takers.append(index)
                rooms.append(room)
                chosen.append(row + len(tokens) - 1)  # the row that gave the last token which was kept
            row += rows[index] + 1
        if not takers:
            return None
        if chosen != list(range(len(hidden))):
            hidden = hidden[torch.tensor(chosen, device=hidden.device)]
        last_tokens = torch.tensor([sampled[index][-1] for index in takers], device=hidden.device)
        names = [ids[index] for index in takers]

        def context(place: int, first: int) -> list[int]:
            batch, index = self.runner.input_batch, takers[place]
            found: list[int] = batch.token_ids_cpu[index, first : batch.num_tokens_no_spec[index]].tolist()
            return found

        if self._ranks == 1:
            drafts = self.drafting.propose(names, hidden, last_tokens, context)
        else:  # ranks draw the same random numbers as long as nobody draws on one of them alone
            devices = [] if hidden.device.type == "cpu" else [hidden.device]
            with torch.random.fork_rng(devices):
                drafts = self.drafting.propose(names, hidden, last_tokens, context)
        if drafts is None or drafts.parents is not None:
            return None
        answer: list[list[int]] = [[] for _ in sampled]
        vocabulary = self.runner.input_batch.vocab_size
        for index, room, tokens in zip(takers, rooms, drafts.tokens.tolist(), strict=True):
            answer[index] = chain(tokens[:room], vocabulary)
        return answer

    def _room(self, index: int, request_id: str) -> int:
        """Draft tokens that the request could still use: verifying so many yields one token more."""
        runner = self.runner
        room: int = runner.max_model_len - int(runner.input_batch.num_tokens_no_spec[index])
        state = runner.requests[request_id]
        if state.sampling_params is not None and state.sampling_params.max_tokens is not None:
            room = min(room, state.sampling_params.max_tokens - len(state.output_token_ids))
        return room - 1


def chain(tokens: list[int], vocabulary: int) -> list[int]:
    """The tokens before the first that is none."""
    for place, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            return tokens[:place]
    return tokens
