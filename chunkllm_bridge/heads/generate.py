"""What the model itself says to prompts, and the hidden states it had while it said it: the training data of heads.

A shard is one safetensors file: `tokens` (n,) int32, the outputs one after the other; `hidden` (n, hidden_size) in the
model's dtype, after the final norm: row i gave tokens[i]; `lengths` (rows,) int32; metadata `groups`, a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from chunkllm_bridge.heads import attention

if TYPE_CHECKING:
    from torch import Tensor

ALONE = 256  # tokens looked at alone in one forward pass


@attrs.frozen(kw_only=True)
class Asked:
    """A prompt as tokens, with how to answer it."""

    group: str
    tokens: Sequence[int]
    temperature: float = 0.0
    output: Sequence[int] | None = None  # known already: only the hidden states are wanted


@attrs.frozen(kw_only=True)
class Said:
    """One output and its hidden states."""

    group: str
    tokens: Tensor  # (n,) int32
    hidden: Tensor  # (n, hidden_size): row i gave tokens[i]


def batches(asked: Sequence[Asked], size: int) -> list[list[Asked]]:
    """Neighbours in length together, so that little is padding."""
    ordered = sorted(asked, key=lambda each: len(each.tokens) + len(each.output or ()))
    return [list(ordered[first : first + size]) for first in range(0, len(ordered), size)]


def say(
    model: Any, asked: Sequence[Asked], *, length: int, seed: int, step: Callable[[int], None] = lambda tokens: None
) -> list[Said]:
    """`length` tokens for each prompt, all in one batch. Text goes on past the end of a turn: engines may be told to.

    `step` hears how many tokens each forward pass gave. Temperature 0 is greedy; others are drawn with `seed`.
    """
    import torch
    from transformers import StaticCache

    device, rows, longest = model.device, len(asked), max(len(each.tokens) for each in asked)
    ids = torch.zeros(rows, longest, dtype=torch.long)
    mask = torch.zeros(rows, longest + length, dtype=torch.long)
    for row, each in enumerate(asked):  # on the left is padding
        ids[row, longest - len(each.tokens) :] = torch.tensor(list(each.tokens))
        mask[row, longest - len(each.tokens) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    temperatures = torch.tensor([[each.temperature] for each in asked], device=device)
    random = torch.Generator(device).manual_seed(seed)
    cache = StaticCache(config=model.config, max_cache_len=longest + length)
    position = (mask[:, :longest].cumsum(1) - 1).clamp(min=0)
    hidden, tokens = [], []
    head = model.get_output_embeddings()
    with torch.inference_mode(), attention.grouped(model):
        for index in range(length):
            states = model.get_decoder()(
                input_ids=ids, attention_mask=mask[:, : longest + index], position_ids=position, past_key_values=cache
            ).last_hidden_state[:, -1]
            picked = _pick(head(states), temperatures, random)
            hidden.append(states)
            tokens.append(picked)
            ids, position = picked[:, None], position[:, -1:] + 1
            step(rows)
        states, said = torch.stack(hidden, 1).cpu(), torch.stack(tokens, 1).int().cpu()
    return [
        Said(group=each.group, tokens=said[row].clone(), hidden=states[row].clone()) for row, each in enumerate(asked)
    ]


def _pick(logits: Tensor, temperatures: Tensor, random: Any) -> Tensor:
    """(rows,) int64: the best at temperature 0, else drawn."""
    import torch

    picked = logits.max(-1).indices  # quicker than argmax
    drawn = temperatures[:, 0].nonzero()[:, 0]
    if len(drawn):
        reached = (logits[drawn].float() / temperatures[drawn]).softmax(-1).double().cumsum(-1)
        uniform = torch.rand(len(drawn), 1, dtype=torch.double, device=logits.device, generator=random)
        found = torch.searchsorted(reached, uniform * reached[:, -1:], right=True)[:, 0]
        picked[drawn] = found.clamp(max=logits.shape[-1] - 1)
    return picked


def read(model: Any, asked: Sequence[Asked], *, step: Callable[[int], None] = lambda tokens: None) -> list[Said]:
    """The hidden states for outputs that are known already: one forward pass for the batch."""
    import torch

    texts = [[*each.tokens, *(each.output or ())] for each in asked]
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):  # on the right is padding: nothing before it sees it
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    with torch.inference_mode():
        states = model.get_decoder()(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False
        ).last_hidden_state.cpu()
    said = []
    for row, each in enumerate(asked):
        output = list(each.output or ())
        first = len(each.tokens) - 1
        hidden = states[row, first : first + len(output)].clone()
        said.append(Said(group=each.group, tokens=torch.tensor(output, dtype=torch.int32), hidden=hidden))
    step(sum(len(each.tokens) for each in said))
    return said


def follow(model: Any, tokenizer: Any, vocabulary: Tensor) -> Tensor:
    """(tokens, hidden) in the model's dtype: its hidden state after a new line and each token of the vocabulary.

    What the model would go on with if it knew no more than that token: heads learn what completes rare words from it.
    """
    import torch

    start = (tokenizer("\n", add_special_tokens=False)["input_ids"] or [0])[-1]
    states = []
    with torch.inference_mode():
        for part in vocabulary.long().to(model.device).split(ALONE):
            ids = torch.stack([torch.full_like(part, start), part], 1)
            states.append(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, 1].cpu())
    return torch.cat(states).clone()


def write(path: Path, said: Sequence[Said]) -> None:
    """The shard, there whole or not at all."""
    import torch
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    tensors = {
        "tokens": torch.cat([each.tokens for each in said]),
        "hidden": torch.cat([each.hidden for each in said]).contiguous(),
        "lengths": torch.tensor([len(each.tokens) for each in said], dtype=torch.int32),
    }
    save_file(tensors, partial, metadata={"groups": json.dumps([each.group for each in said])})
    partial.replace(path)


def shard(path: Path) -> list[Said]:
    """What `write` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        groups = json.loads(file.metadata()["groups"])
        lengths = file.get_tensor("lengths").tolist()
        tokens = file.get_tensor("tokens").split(lengths)
        hidden = file.get_tensor("hidden").split(lengths)
    return [
        Said(group=group, tokens=own, hidden=states) for group, own, states in zip(groups, tokens, hidden, strict=True)
    ]
