"""The worker's side of the bridge in a FakeEngine: attention, drafts and weights, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from chunkllm_bridge.common.abi import (
    AttentionPlan,
    AttentionStep,
    DraftsPlan,
    DraftsStep,
    Outcome,
    Seam,
    Step,
    WeightsPlan,
    WeightsStep,
)
from chunkllm_bridge.common.control import RankDesk
from chunkllm_bridge.common.fake import FORMATS, HIDDEN, LAYERS, STRATEGIES, VOCAB, FakeEngine, Request, token_at
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.quota import pages_for
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec

if TYPE_CHECKING:
    import torch

WORKER_SEAMS = frozenset({Seam.ATTENTION, Seam.DRAFTS, Seam.WEIGHTS})

P = TypeVar("P", AttentionPlan, DraftsPlan, WeightsPlan)


class FakeWorkers:
    """Every rank is asked, and all of them answer alike; what the first says is done."""

    def __init__(self, engine: FakeEngine, spec: Spec, catalogue: Registry) -> None:
        self.engine = engine
        self.desks: list[RankDesk] = []
        with contextlib.ExitStack() as undo:
            for rank in range(engine.info.world_size):
                info = attrs.evolve(engine.info, role="worker", rank=rank)
                self.desks.append(RankDesk(Host(spec, catalogue, info, WORKER_SEAMS, clock=engine.clock)))
                undo.callback(self.desks[-1].host.close)
            undo.callback(setattr, engine, "lookahead", engine.lookahead)
            undo.callback(engine.formats.clear)
            self._load_weights()
            self._undo = undo.pop_all()

    def handle(self, verb: str, wire: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """A control verb on every rank; some refuse on cue."""
        refusing = self.engine.faults.refusing_ranks if verb == "prepare" else set()
        return [
            {"ok": False, "error": "refuses on cue", "rank": rank} if rank in refusing else desk.handle(verb, wire)
            for rank, desk in enumerate(self.desks)
        ]

    def close(self) -> None:
        self._undo.close()

    def forward(self, original: Callable[[Sequence[Request]], None], batch: Sequence[Request]) -> None:
        chosen = self._strategy(batch) if batch else None
        before = [(request, len(request.drafts), request.length) for request in batch]
        original(batch)
        accepted = tuple(request.length - length - 1 for request, _, length in before)
        if batch:
            self._settle(Seam.ATTENTION, applied=chosen is not None, plan=chosen)
        if any(drafted for _, drafted, _ in before):
            self._settle(Seam.DRAFTS, applied=True, accepted=accepted)
        self._draft([request for request in batch if not request.finished])

    def roll_back(self, original: Callable[[Sequence[Request]], None], batch: Sequence[Request]) -> None:
        original(batch)
        for seam in (Seam.ATTENTION, Seam.DRAFTS):
            self._settle(seam, applied=False, reason="the step was rolled back")

    def _load_weights(self) -> None:
        for layer in LAYERS if self._seated(Seam.WEIGHTS) else ():
            step = WeightsStep(layer=layer, weight=tensor([[0.5] * HIDDEN] * HIDDEN, "float32"))
            plan = self._first(Seam.WEIGHTS, step, WeightsPlan, lambda plan: plan.format in FORMATS)
            if plan is not None:
                self.engine.formats[layer] = plan.format
            self._settle(Seam.WEIGHTS, applied=plan is not None, plan=plan)

    def _strategy(self, batch: Sequence[Request]) -> AttentionPlan | None:
        if not self._seated(Seam.ATTENTION):
            return None
        lengths = [request.length for request in batch]
        width = max(pages_for(length, self.engine.block_size) for length in lengths)
        step = AttentionStep(
            index=self.engine.index,
            num_requests=len(batch),
            num_tokens=len(batch),
            decode_only=all(request.tokens for request in batch),
            query_start_loc=tensor(range(len(batch) + 1), "int32"),
            seq_lens=tensor(lengths, "int32"),
            block_table=tensor([[0] * width for _ in batch], "int32"),
        )
        plan = self._first(Seam.ATTENTION, step, AttentionPlan, lambda plan: plan.strategy in STRATEGIES)
        if plan is not None:
            self.engine.strategies[plan.strategy] += 1
        return plan

    def _draft(self, batch: Sequence[Request]) -> None:
        engine, spec = self.engine, self.desks[0].host.spec
        engine.lookahead = spec.slots if self._seated(Seam.DRAFTS) else 0
        if not (engine.lookahead and batch):
            return
        step = DraftsStep(
            index=engine.index,
            request_ids=tuple(request.id for request in batch),
            hidden_states=tensor([hidden(request) for request in batch], "float32"),
            last_tokens=tensor([request.tokens[-1] for request in batch], "int64"),
            max_tokens=spec["speculative.tokens"],
        )
        answers = self._answers(Seam.DRAFTS, step, DraftsPlan, lambda plan: drafts_fit(plan, step))
        for row, request in enumerate(batch):
            request.drafts = next((plan.tokens[row] for plan in answers if plan.tokens[row]), ())

    def _first(self, seam: Seam, step: Step, kind: type[P], usable: Callable[[P], bool]) -> P | None:
        return next(iter(self._answers(seam, step, kind, usable)), None)

    def _answers(self, seam: Seam, step: Step, kind: type[P], usable: Callable[[P], bool]) -> list[P]:
        """The plans that this engine can use, highest priority first; the others count as rejected."""
        answers: list[list[P]] = [[] for _ in self.desks]
        for desk, plans in zip(self.desks, answers, strict=True):
            for generation, plan, _ in desk.host.ask(seam, step):
                if isinstance(plan, kind) and usable(plan):
                    plans.append(plan)
                elif plan is not None:
                    generation.guard.fail("rejected", f"the fake engine cannot use {plan}")
        return answers[0]

    def _seated(self, seam: Seam) -> bool:
        return self.desks[0].host.seated(seam)

    def _settle(self, seam: Seam, **outcome: Any) -> None:
        for desk in self.desks:
            desk.host.settle(seam, Outcome(seam=seam, step=self.engine.index, **outcome))


def drafts_fit(plan: DraftsPlan, step: DraftsStep) -> bool:
    """Whether it has a row for each request, none too long, and is a chain."""
    rows = plan.tokens
    return plan.parents is None and len(rows) == len(step.request_ids) and all(len(r) <= step.max_tokens for r in rows)


def hidden(request: Request) -> list[float]:
    """A toy hidden state; its first number is the position that is drafted next."""
    return [
        float(request.length),
        *(token_at(f"hidden {request.id}", request.length + i) / VOCAB for i in range(1, HIDDEN)),
    ]


def tensor(rows: Iterable[Any], dtype: str) -> torch.Tensor:
    """A tensor, or the plain numbers where there is no torch."""
    rows = list(rows)
    try:
        import torch
    except ImportError:
        return cast("torch.Tensor", rows)
    return torch.tensor(rows, dtype=getattr(torch, dtype))
