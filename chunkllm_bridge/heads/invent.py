"""Prompts that the model makes up itself: what it would put into a user's turn (after Magpie, arXiv 2406.08464).

Templates times topics run out, and heads learn them by heart. A chat model has seen far more kinds of questions than a
list holds: it writes the user's turn as willingly as its own, and no two of them are alike.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from typing import Any

from chunkllm_bridge.heads.generate import Asked, batches, say
from chunkllm_bridge.heads.prompts import FILE

LENGTH = 32  # tokens of a prompt; a turn that has not ended by then is closed there
TEMPERATURE = 0.9
RAW = 0.1  # share of raw texts, begun after a new line
OPEN = 0.5  # share of the turns that begin with one of the openings, so that no kind of question is rare
MARK = "\N{WHITE SQUARE}"


def invent(
    model: Any, tokenizer: Any, count: int, *, batch: int, seed: int, step: Callable[[int], None] = lambda tokens: None
) -> list[Asked]:
    """`count` prompts, ready to be answered. `step` hears how many tokens each forward pass gave."""
    begun, closing = _begun(tokenizer, count, seed)
    prompts: list[Asked] = []
    for index, group in enumerate(batches(begun, batch)):
        answers = say(model, group, length=LENGTH, seed=seed * 1_000_003 + index, step=step)
        for each, said in zip(group, answers, strict=True):
            words = said.tokens.tolist()
            if each.group == "raw" or not closing:
                prompts.append(Asked(group="invented", tokens=[*each.tokens, *words]))
                continue
            end = words.index(closing[0]) if closing[0] in words else len(words)
            if end or each.group == "opened":
                prompts.append(Asked(group="invented", tokens=[*each.tokens, *words[:end], *closing]))
    random.Random(seed).shuffle(prompts)
    return prompts


def _begun(tokenizer: Any, count: int, seed: int) -> tuple[list[Asked], list[int]]:
    """Beginnings, and what closes a user's turn and opens the model's; without a chat template all are raw."""
    chance = random.Random(seed)
    line = (tokenizer("\n", add_special_tokens=False)["input_ids"] or [0])[-1:]
    turn, closing = _turn(tokenizer)
    openings = tomllib.loads(FILE.read_text(encoding="utf-8"))["invent"]["openings"]
    begun = []
    for _ in range(count):
        if not turn or chance.random() < RAW:
            begun.append(Asked(group="raw", tokens=line, temperature=TEMPERATURE))
        elif chance.random() < OPEN:
            words = tokenizer(chance.choice(openings), add_special_tokens=False)["input_ids"]
            begun.append(Asked(group="opened", tokens=[*turn, *words], temperature=TEMPERATURE))
        else:
            begun.append(Asked(group="turn", tokens=turn, temperature=TEMPERATURE))
    return begun, closing


def _turn(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before and after the words of a user's turn."""
    if not getattr(tokenizer, "chat_template", None):
        return [], []
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=True, tokenize=False
    )
    before, _, after = text.partition(MARK)
    turn, closing = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return turn, closing
