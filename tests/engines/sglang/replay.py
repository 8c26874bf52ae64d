"""A plugin that drafts what it was told comes next, with mistakes and in trees, in a scheduler's own process."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import attrs
import torch

from chunkllm_bridge import DraftsPlan, Plugin, PluginSpec, Seam

DEPTH = 8


@attrs.frozen
class Config:
    memory: str = ""  # a file of `remember`
    mistakes: float = 0.0  # of the drafts, have a wrong token somewhere
    branches: int = 0  # wrong brothers of every draft: a tree
    fault: str = ""  # how it misbehaves
    watch: str = ""  # a file that takes each request's text and newest token at each step


class Replay(Plugin):
    """Right rows of hidden states are the only way to right drafts: the nearest one remembered says what follows."""

    spec = PluginSpec(
        name="replay", version="1.0", abi=(1, 2), seams={Seam.DRAFTS}, requires={"spec.chain"}, optional={"spec.tree"}
    )
    Config = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._random = random.Random(0)
        self.states, self.tokens = torch.load(
            config.memory
        )  # (rows, hidden size), (rows, DEPTH) with -1 behind the end

    def draft_nodes(self, tokens: int) -> int:
        return tokens * (1 + self.config.branches)

    def plan_drafts(self, step: Any) -> DraftsPlan | None:
        if self.config.fault:
            return faulty(self.config.fault, step)
        if self.config.watch:
            write_down(Path(self.config.watch), step)
        nearest = torch.cdist(step.hidden_states.float(), self.states).argmin(dim=1)
        tokens = self.tokens[nearest][:, : step.max_tokens].clone()
        for row in tokens:
            if self._random.random() < self.config.mistakes:
                place = self._random.randrange(len(row))
                row[place] = wrong(row[place])
        if not self.config.branches:
            return DraftsPlan(tokens=tokens)
        return bushy(tokens, self.config.branches, step)


def wrong(token: Any, by: int = 1) -> Any:
    return torch.where(token < 0, token, (token + by) % 128)


def bushy(chains: torch.Tensor, branches: int, step: Any) -> DraftsPlan:
    """The chain with wrong brothers before each of its tokens, so that its path is never the first rows; the last
    brother of each repeats the right token, and leads nowhere."""
    depth = min(chains.shape[1], step.max_nodes // (1 + branches))
    columns, parents, last = [], [], -1
    for place in range(depth):
        right = chains[:, place]
        before = [wrong(right, 1 + number) for number in range(branches - 1)]
        columns += [*before, right, right]
        parents += [last] * (branches + 1)
        last = len(columns) - 2
    return DraftsPlan(tokens=torch.stack(columns, 1), parents=tuple(parents))


def faulty(kind: str, step: Any) -> Any:
    rows = len(step.request_ids)
    if kind == "raises":
        raise RuntimeError("as asked")
    if kind == "late":
        time.sleep(0.3)
    if kind == "shape":
        return DraftsPlan(tokens=torch.zeros(rows + 1, 1, dtype=torch.int64))
    if kind == "type":
        return DraftsPlan(tokens=torch.zeros(rows, 1))
    if kind == "wide":
        return DraftsPlan(tokens=torch.zeros(rows, step.max_tokens + 1, dtype=torch.int64))
    if kind == "vocabulary":
        return DraftsPlan(tokens=torch.full((rows, step.max_tokens), 1 << 20))
    if kind == "nonsense":
        return DraftsPlan(tokens=torch.full((rows, step.max_tokens), 7))
    if kind == "tree":
        return DraftsPlan(tokens=torch.zeros(rows, 2, dtype=torch.int64), parents=(1, 0))
    return kind


def write_down(file: Path, step: Any) -> None:
    """Of every request the text that is shown (None where it is not), its newest token, and whether parts agree."""
    with file.open("a") as out:
        for place, (name, token) in enumerate(zip(step.request_ids, step.last_tokens.tolist(), strict=True)):
            text = step.context(place, 0)
            firsts = () if text is None else (0, 1, len(text) - 1, len(text), len(text) + 5)
            in_parts = all(list(step.context(place, first)) == list(text[first:]) for first in firsts)
            print(json.dumps([name, None if text is None else list(text), token, in_parts]), file=out)


def remember(model: Path, texts: list[tuple[list[int], list[int]]], file: Path) -> None:
    """Keep the hidden states from which each of `texts` (prompt ids, output ids) was generated, and what followed."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
    states, tokens = [], []
    for prompt, said in texts:
        with torch.no_grad():
            hidden = network(torch.tensor([prompt + said])).last_hidden_state[0]
        for place in range(len(said) - 1):  # the state that gave the token at `place`
            states.append(hidden[len(prompt) - 1 + place])
            tokens.append((said[place + 1 : place + 1 + DEPTH] + [-1] * DEPTH)[:DEPTH])
    torch.save((torch.stack(states), torch.tensor(tokens)), file)


def lay(folder: Path) -> Path:
    """Install it in a folder for the path, as pip would."""
    info = folder / "other_replay-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "replay_plugin.py").write_text(Path(__file__).read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-replay\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chunkllm.plugins]\nreplay = replay_plugin:Replay\n")
    return folder
