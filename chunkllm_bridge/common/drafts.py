"""What both engines do at the DRAFTS seam in a worker: ask the plugins, keep their drafts within bounds, count."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs

from chunkllm_bridge.common.abi import DraftsPlan, DraftsStep, EngineInfo, Outcome, Seam
from chunkllm_bridge.common.acceptance import Acceptance
from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.fitting import Drafts, Misfit, fit
from chunkllm_bridge.common.generations import Generation
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.spec import Spec

if TYPE_CHECKING:
    import torch

log = get_logger("drafts")

__all__ = ["Drafting", "Drafts", "check_speculation"]

TRIAL = 200
"""Drafts of one plugin after which it is asked whether they were of any use, again and again."""
USELESS = 0.05
"""Below this share of drafts whose first token was right, they are of none: frequent words alone bring as much."""
MEANING = "the heads were probably made for another model, or are off by one position"


@attrs.frozen
class Asked:
    """What a step was asked for; an engine that schedules ahead verifies it after the next one was asked for."""

    step: int
    owners: Mapping[str, Generation] = attrs.field(factory=dict)  # request -> whose draft it has
    sources: Mapping[str, str] = attrs.field(factory=dict)  # request -> what drafted for it


class Drafting:
    """The DRAFTS seam of one worker. Adapters call it between the sampling of one step and the next.

    Nothing here raises: where our own code fails, the engine decodes plainly and the log says why.
    """

    def __init__(self, host: Host, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.host, self.acceptance = host, Acceptance(clock)
        self.asked = Asked(0)  # the newest
        self._width = 0  # draft tokens per request in the last plan
        self._last: Generation | None = None  # who drafted last: a request may be verified later than others
        self._trials: WeakKeyDictionary[Generation, dict[str, list[int]]] = WeakKeyDictionary()  # by source: drafts,
        # and those whose first token was right
        self.broken = False  # our own code failed before

    @property
    def limit(self) -> int:
        """Draft tokens on one path that may be verified now; 0 = speculation is off."""
        spec, info = self.host.spec, self.host.info
        if spec["speculative.plugin"] is None or not self.host.answering(Seam.DRAFTS):
            return 0
        return min(int(spec["speculative.tokens"]), info.draft_tokens)

    def propose(
        self,
        request_ids: Sequence[str],
        hidden_states: torch.Tensor,  # (num_requests, hidden_size), after the final norm: each gave its last token
        last_tokens: torch.Tensor,  # (num_requests,) int64
        context: Callable[[int, int], Sequence[int] | None] | None = None,  # as in `DraftsStep`
    ) -> Drafts | None:
        """The plugins' drafts, a row for each request in this order; None where nobody drafts for anybody."""
        try:
            limit = self.limit
            drafts = None
            if limit and request_ids:
                drafts = self._ask(limit, request_ids, hidden_states, last_tokens, context)
            self._width = 0 if drafts is None else int(drafts.tokens.shape[1])
            return drafts
        except Exception as error:  # ours: a request must not pay for it
            self.failed("propose", error)
            return None

    def _ask(
        self,
        limit: int,
        request_ids: Sequence[str],
        hidden_states: torch.Tensor,
        last_tokens: torch.Tensor,
        context: Callable[[int, int], Sequence[int] | None] | None,
    ) -> Drafts | None:
        info = self.host.info
        self.asked = Asked(self.asked.step + 1)
        step = DraftsStep(
            index=self.asked.step,
            request_ids=tuple(request_ids),
            hidden_states=hidden_states,
            last_tokens=last_tokens,
            max_tokens=limit,
            max_nodes=info.draft_nodes if info.draft_nodes > info.draft_tokens else limit,
            **({} if context is None else {"context": context}),
        )
        sources: dict[Generation, Sequence[str]] = {}
        chains: list[tuple[Generation, Drafts]] = []
        for generation, plan, _ in self.host.ask(Seam.DRAFTS, step):
            if not isinstance(plan, DraftsPlan):
                continue
            drafts = fit(plan, step, info.vocab_size)
            if isinstance(drafts, Misfit):
                generation.guard.fail(drafts.kind, f"plan_drafts: {drafts.reason}")
            elif drafts.tokens.shape[1]:
                sources[generation] = plan.sources or (generation.name,) * len(request_ids)
                if drafts.parents is None:
                    chains.append((generation, drafts))
                elif not chains:
                    self._own(request_ids, [generation] * len(request_ids), sources)
                    return drafts
        if not chains:
            return None
        drafts, owners = merged(chains) if len(chains) > 1 else (chains[0][1], [chains[0][0]] * len(request_ids))
        self._own(request_ids, owners, sources)
        return drafts

    def _own(
        self,
        request_ids: Sequence[str],
        owners: Sequence[Generation],
        sources: Mapping[Generation, Sequence[str]],
    ) -> None:
        self._last = owners[0]
        places = enumerate(zip(request_ids, owners, strict=True))
        by = {request_id: sources[owner][place] for place, (request_id, owner) in places}
        self.asked = Asked(self.asked.step, dict(zip(request_ids, owners, strict=True)), by)

    def verified(
        self,
        request_ids: Sequence[str],
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float = 0.0,
        asked: Asked | None = None,
    ) -> None:
        """How the drafts of a step fared, a number per request of that step; all 0 drafted is a plain decode.

        `seconds` from the verification before to this one; 0 where they say nothing about decoding: somebody was
        prefilled in between, or nobody was there. `asked` as it was when the step began; None: the newest.
        """
        try:
            self._verified(request_ids, drafted, accepted, seconds, asked or self.asked)
        except Exception as error:  # ours: a request must not pay for it
            self.failed("verified", error)

    def _verified(
        self,
        request_ids: Sequence[str],
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
        asked: Asked,
    ) -> None:
        found = [
            asked.owners.get(request_id, self._last) if tokens else None
            for request_id, tokens in zip(request_ids, drafted, strict=True)
        ]
        owners = ["" if generation is None else generation.name for generation in found]
        names = zip(request_ids, owners, strict=True)
        sources = [asked.sources.get(request_id, name or "unknown") for request_id, name in names]
        self.acceptance.note(request_ids, drafted, accepted, sources)
        planned = {generation.name for generation in asked.owners.values()}
        whose = {name for name in owners if name}

        def outcome(name: str) -> Outcome:
            reason = ""
            if name not in whose:
                others = f"the drafts of {', '.join(sorted(whose))} were verified" if whose else ""
                reason = others or ("its drafts were not verified" if name in planned else "it drafted nothing")
            return Outcome(
                seam=Seam.DRAFTS,
                step=asked.step,
                applied=not reason,
                reason=reason,
                drafted=tuple(d if owner == name else 0 for d, owner in zip(drafted, owners, strict=True)),
                accepted=tuple(a if owner == name else 0 for a, owner in zip(accepted, owners, strict=True)),
                sources=tuple(source if owner == name else "" for source, owner in zip(sources, owners, strict=True)),
                seconds=seconds if whose <= {name} else 0.0,
            )

        self.host.settle(Seam.DRAFTS, outcome)
        for generation, source, right in zip(found, sources, accepted, strict=True):
            if generation is not None:
                self._judge(generation, source, right > 0)

    def _judge(self, generation: Generation, source: str, is_right: bool) -> None:
        """Let a plugin step aside whose drafts are of no use, even if only those of one source of its own are."""
        if generation.guard.tripped:
            return
        trials = self._trials.setdefault(generation, {})
        trial = trials.setdefault(source, [0, 0])
        trial[0] += 1
        trial[1] += is_right
        if trial[0] < TRIAL:
            return
        drafts, right = trials.pop(source)
        if right < USELESS * drafts:
            log.error(
                "drafts.stepped_aside",
                plugin=generation.name,
                source=source,
                accepted=right,
                drafts=drafts,
                reason=MEANING,
            )
            agreed = f"the model agreed with the first token of {right} of {drafts} drafts"
            generation.guard.step_aside(f"{agreed}: {MEANING}")

    def dropped(self, reason: str) -> None:
        """A step and its drafts came to nothing, e.g. it was rolled back."""
        try:
            self.asked = Asked(self.asked.step)
            self.host.settle(Seam.DRAFTS, Outcome(seam=Seam.DRAFTS, step=self.asked.step, applied=False, reason=reason))
        except Exception as error:  # ours: a request must not pay for it
            self.failed("dropped", error)

    def finished(self, request_id: str) -> None:
        """A request is over, however it ended."""
        self.acceptance.finished(request_id)

    def report(self) -> dict[str, Any]:
        """For the status of every rank; plain data."""
        spec, info = self.host.spec, self.host.info
        return {
            "plugin": spec["speculative.plugin"],
            "limit": self.limit,
            "launched": info.draft_tokens,
            "nodes": info.draft_nodes,
            "width": self._width,
            "stepped_aside": self.host.aside(Seam.DRAFTS),
            **self.acceptance.report(),
        }

    def failed(self, verb: str, error: Exception) -> None:
        """Our own code failed, here or in an adapter: this step goes without."""
        if not self.broken:  # once: it would be told at every step
            self.broken = True
            log.error("drafts.failed", verb=verb, reason=f"{type(error).__name__}: {error}", exc_info=error)


def merged(chains: Sequence[tuple[Generation, Drafts]]) -> tuple[Drafts, list[Generation]]:
    """Each request's first chain, highest priority first, and whose it is. The tensors are looked at: a device sync."""
    width = max(int(drafts.tokens.shape[1]) for _, drafts in chains)
    first = chains[0][1].tokens
    tokens, owners = first.new_full((len(first), width), -1), [chains[0][0]] * len(first)
    free = list(range(len(first)))
    for generation, drafts in chains:
        begins = drafts.tokens[:, 0].tolist()
        took = [row for row in free if begins[row] >= 0]
        if took:
            tokens[took, : drafts.tokens.shape[1]] = drafts.tokens[took]
        for row in took:
            owners[row] = generation
        free = [row for row in free if begins[row] < 0]
    return Drafts(tokens), owners


def check_speculation(spec: Spec, before: Spec, info: EngineInfo) -> None:
    """Whether a running engine can do what a change asks of it. Raises `ControlError` with what to do instead."""
    name, tokens, most = spec["speculative.plugin"], spec["speculative.tokens"], info.draft_tokens
    if name is None or (name, tokens) == (before["speculative.plugin"], before["speculative.tokens"]):
        return
    if not most:
        why = f"speculative.plugin = {name}: this engine was not launched to speculate; start it with that setting"
        raise ControlError(why, 409)
    if tokens > most:
        raise ControlError(
            f"speculative.tokens = {tokens}: the engine made room for {most} at start; more need a restart", 409
        )
