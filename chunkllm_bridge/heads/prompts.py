"""The built-in prompts: templates times topics, in groups, and a held-out set that shares neither with them."""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

FILE = Path(__file__).with_name("prompts.toml")
HELD = ("chat", "code", "lists", "story")  # the groups that acceptance is reported for


@attrs.frozen
class Prompt:
    """A prompt before it is tokens."""

    group: str
    text: str
    chat: bool = True  # a user's turn, if the model has a chat template; False: raw text to go on with

    def tokens(self, tokenizer: Any) -> list[int]:
        """Token ids, as an engine's chat or completion endpoint would make them."""
        if self.chat and getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": self.text}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(tokenizer(self.text)["input_ids"])


def training(seed: int) -> list[Prompt]:
    """All training prompts: the groups take turns, each in a shuffled order, so any first part is spread over them."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in _prompts("train"):
        groups.setdefault(prompt.group, []).append(prompt)
    for group in groups.values():
        random.Random(seed).shuffle(group)
    turns = itertools.zip_longest(*groups.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def held_out() -> list[Prompt]:
    """The prompts that acceptance is measured on."""
    return list(_prompts("held"))


def _prompts(part: str) -> Iterator[Prompt]:
    groups: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))[part]
    for name, group in groups.items():
        for template, topic in itertools.product(group["templates"], group["topics"]):
            text = template.replace("{}", topic).replace("{{", "{").replace("}}", "}")
            yield Prompt(name, text, group.get("chat", True))
