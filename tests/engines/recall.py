"""A plugin that drafts what it has read: it remembers hidden states and the tokens that came after them."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import attrs
import torch

from chunkllm_bridge import DraftsPlan, Plugin, PluginSpec, Seam


@attrs.frozen
class Config:
    memory: str | None = None  # a file of `Recall.save`, for ranks in processes of their own
    checkpoint: str | None = None  # a folder; what the engine gives of its matrices must be what lies there


class Recall(Plugin):
    """Right rows of hidden states are the only way to right drafts: the nearest one that was read says what follows."""

    spec = PluginSpec(name="recall", version="1.0", abi=(1, 2), seams={Seam.DRAFTS}, requires={"spec.chain"})
    Config = Config

    # what a test turns, in its own process
    reading: ClassVar[bool] = False
    mistakes: ClassVar[float] = 0.0  # of the drafts, have a wrong token somewhere
    fault: ClassVar[Any] = None  # called with the step instead of drafting
    outcomes: ClassVar[list[Any]] = []
    steps: ClassVar[list[Any]] = []
    shown: ClassVar[dict[str, list[Any]] | None] = None  # request -> its text and newest token at each step
    states: ClassVar[torch.Tensor | None] = None  # (rows, hidden size)
    tokens: ClassVar[torch.Tensor | None] = None  # (rows, tokens that followed), -1 behind the end
    _read: ClassVar[dict[str, list[tuple[torch.Tensor, int]]]] = {}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._random = random.Random(0)
        if config.memory is not None:
            Recall.states, Recall.tokens = torch.load(config.memory)

    def prepare(self, preparation: Any) -> None:
        if self.config.checkpoint is not None:
            from safetensors.torch import load_file

            stored = load_file(f"{self.config.checkpoint}/model.safetensors")
            for name, key in (("embedding", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
                ids = torch.tensor([511, 0, 255, 256, 257])
                assert torch.equal(stored[key], preparation.model.rows(name))
                assert torch.equal(stored[key][ids], preparation.model.rows(name, ids))

    @classmethod
    def read(cls, run: Any) -> None:
        """Let `run()` go through what is to be remembered."""
        cls._read.clear()
        cls.reading = True
        run()
        cls.reading = False
        states, tokens = [], []
        for rows in cls._read.values():
            said = [token for _, token in rows]
            for place, (state, _) in enumerate(rows):
                states.append(state)
                tokens.append((said[place + 1 : place + 9] + [-1] * 8)[:8])
        cls.states, cls.tokens = torch.stack(states), torch.tensor(tokens)

    @classmethod
    def save(cls, path: Any) -> None:
        torch.save((cls.states, cls.tokens), path)

    def plan_drafts(self, step: Any) -> DraftsPlan | None:
        Recall.steps.append((step.request_ids, step.max_tokens))
        if Recall.reading:
            for name, state, token in zip(step.request_ids, step.hidden_states, step.last_tokens.tolist(), strict=True):
                Recall._read.setdefault(name, []).append((state.clone(), token))
            return None
        if Recall.shown is not None:
            for place, (name, token) in enumerate(zip(step.request_ids, step.last_tokens.tolist(), strict=True)):
                text = list(step.context(place, 0))
                firsts = (0, 1, len(text) - 1, len(text), len(text) + 5)
                parts = [list(step.context(place, first)) for first in firsts]
                Recall.shown.setdefault(name, []).append((text, token, parts == [text[first:] for first in firsts]))
        if Recall.fault is not None:
            return Recall.fault(step)
        if Recall.states is None:
            return None
        nearest = torch.cdist(step.hidden_states.float(), Recall.states.float()).argmin(dim=1)
        tokens = Recall.tokens[nearest][:, : step.max_tokens].clone()
        for row in tokens:
            if self._random.random() < Recall.mistakes:
                place = self._random.randrange(len(row))
                if row[place] >= 0:
                    row[place] = (row[place] + 1) % 128
        return DraftsPlan(tokens=tokens)

    def settle(self, outcome: Any) -> None:
        Recall.outcomes.append(outcome)
