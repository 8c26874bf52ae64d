"""The worker's side of the bridge in a FakeEngine: attention, drafts and weights, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from chunkllm_bridge.common.abi import (
    AttentionPlan,
    AttentionStep,
    Outcome,
    Seam,
    Step,
    WeightsPlan,
    WeightsStep,
)
from chunkllm_bridge.common.control import RankDesk
from chunkllm_bridge.common.drafts import Drafting
from chunkllm_bridge.common.fake import (
    FORMATS,
    HIDDEN,
    LAYERS,
    STEP_SECONDS,
    STRATEGIES,
    VOCAB,
    FakeEngine,
    Request,
    token_at,
)
from chunkllm_bridge.common.fake_model import fake_model
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.quota import pages_for
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec

if TYPE_CHECKING:
    import torch

WORKER_SEAMS = frozenset({Seam.ATTENTION, Seam.DRAFTS, Seam.WEIGHTS})

P = TypeVar("P", AttentionPlan, WeightsPlan)


class FakeWorkers:
    """Every rank is asked, and all of them answer alike; what the first says is done."""

    def __init__(self, engine: FakeEngine, spec: Spec, catalogue: Registry) -> None:
        self.engine = engine
        self.desks: list[RankDesk] = []
        self.drafting: list[Drafting] = []
        model = fake_model()
        with contextlib.ExitStack() as undo:
            for rank in range(engine.info.world_size):
                info = attrs.evolve(engine.info, role="worker", rank=rank)
                host = Host(spec, catalogue, info, WORKER_SEAMS, model=model, clock=engine.clock)
                undo.callback(host.close)
                self.drafting.append(Drafting(host, clock=engine.clock))
                self.desks.append(RankDesk(host, self.drafting[-1]))
            undo.callback(setattr, engine, "lookahead", engine.lookahead)
            engine.lookahead = engine.info.draft_nodes
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
        for drafting in self.drafting if self.engine.info.draft_tokens and batch else ():
            ids, drafted = [request.id for request in batch], [number for _, number, _ in before]
            decodes = all(length > request.prompt for request, _, length in before)
            drafting.verified(ids, drafted, accepted, STEP_SECONDS if decodes else 0.0)
            for request in batch:
                if request.finished:
                    drafting.finished(request.id)
        self._draft([request for request in batch if not request.finished])

    def roll_back(self, original: Callable[[Sequence[Request]], None], batch: Sequence[Request]) -> None:
        original(batch)
        self._settle(Seam.ATTENTION, applied=False, reason="the step was rolled back")
        for drafting in self.drafting if self.engine.info.draft_tokens else ():
            drafting.dropped("the step was rolled back")

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
        """What the first rank proposes is verified; the others are asked too, as ranks are."""
        limit = self.drafting[0].limit
        if not (limit and batch):
            return
        ids = [request.id for request in batch]
        states = tensor([hidden(request) for request in batch], "float32")
        last = tensor([request.tokens[-1] for request in batch], "int64")

        def context(place: int, first: int) -> list[int]:
            return [*[0] * batch[place].prompt, *batch[place].tokens][first:]

        drafts, *_ = [drafting.propose(ids, states, last, context) for drafting in self.drafting]
        if drafts is None:
            return
        for request, row in zip(batch, drafts.tokens.tolist(), strict=True):
            request.parents = drafts.parents
            end = next((at for at, token in enumerate(row) if token < 0), len(row))
            request.drafts = tuple(row if drafts.parents else row[:end])

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
