"""The first stage: shards of what the model says, made once and kept in the work folder, so that a run can go on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chunkllm_bridge.common.errors import ConfigError, Problem
from chunkllm_bridge.heads import generate
from chunkllm_bridge.heads.generate import Asked
from chunkllm_bridge.heads.prompts import Prompt, held_out, training

DRAWN = 0.2  # share of the prompts answered at TEMPERATURE; all of them when the prompts are gone round again
TEMPERATURE = 0.7
READ = 4  # known outputs in one forward pass


def from_files(files: Sequence[Path], tokenizer: Any, vocab: int) -> tuple[list[Asked], list[Asked]]:
    """Rows of JSONL files: those to answer, and those answered. Raises `ConfigError` with every bad row (first 20).

    `{"p": ids, "o": ids}` is a prompt and its output as token ids; `{"prompt": text}` or `{"messages": [...]}`
    is a prompt.
    """
    problems: list[Problem] = []
    open_: list[Asked] = []
    known: list[Asked] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(Problem(key="--data", value=str(file), reason=f"cannot be read: {error}", where="command"))
            continue
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                asked = _row(json.loads(line), tokenizer, vocab)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                where = f"{file}:{number}"
                problems.append(Problem(key="row", value=line[:60], reason=str(error) or repr(error), where=where))
                continue
            (open_ if asked.output is None else known).append(asked)
    if problems:
        raise ConfigError(problems[:20])
    return open_, known


def _row(row: Any, tokenizer: Any, vocab: int) -> Asked:
    match row:
        case {"p": [_, *_] as prompt, "o": [_, *_] as output}:
            bad = [token for token in (*prompt, *output) if not (isinstance(token, int) and 0 <= token < vocab)]
            if bad:
                raise ValueError(f"{bad[0]!r} is no token of the model, whose ids are 0 to {vocab - 1}")
            return Asked(group="file", tokens=prompt, output=output)
        case {"prompt": str(text)}:
            return Asked(group="file", tokens=Prompt("file", text).tokens(tokenizer))
        case {"messages": [_, *_] as turns}:
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            return Asked(group="file", tokens=tokenizer(text, add_special_tokens=False)["input_ids"])
    raise ValueError('a row is {"prompt": text}, {"messages": [...]} or {"p": [ids], "o": [ids]}, none of them empty')


def to_ask(tokenizer: Any, first: Sequence[Asked], *, count: int, seed: int) -> list[Asked]:
    """`count` prompts: those of files, then the built-in ones, shuffled, then both again at `TEMPERATURE`."""
    own = [Asked(group=prompt.group, tokens=prompt.tokens(tokenizer)) for prompt in training(seed)]
    pool = [*first, *own]
    asked = []
    chance = random.Random(seed)
    for index in range(count):
        each = pool[index % len(pool)]
        drawn = index >= len(pool) or chance.random() < DRAWN
        asked.append(Asked(group=each.group, tokens=each.tokens, temperature=TEMPERATURE if drawn else 0.0))
    return asked


def held(tokenizer: Any) -> list[Asked]:
    return [Asked(group=prompt.group, tokens=prompt.tokens(tokenizer)) for prompt in held_out()]


def gather(
    model: Any,
    work: Path,
    parts: dict[str, list[Asked]],
    *,
    length: int,
    batch: int,
    seed: int,
    step: Callable[[str, int], None] = lambda part, tokens: None,
) -> None:
    """Make the shards that are missing: `PART-00000.safetensors`, ... A shard made before is counted and kept."""
    for part, asked in parts.items():
        known = bool(asked) and asked[0].output is not None
        groups = list(enumerate(generate.batches(asked, READ if known else batch)))
        random.Random(seed).shuffle(groups)  # so that what is there after a while is no special part
        for index, group in groups:
            path = work / f"{part}-{index:05d}.safetensors"
            if path.exists():
                step(part, sum(len(each.output or range(length)) for each in group))
                continue

            def heard(tokens: int, part: str = part) -> None:
                step(part, tokens)

            if known:
                said = generate.read(model, group, step=heard)
            else:
                number = int(hashlib.sha256(f"{seed} {part} {index}".encode()).hexdigest()[:8], 16)
                said = generate.say(model, group, length=length, seed=number, step=heard)
            generate.write(path, said)


def shards(work: Path, part: str) -> list[Path]:
    return sorted(work.glob(f"{part}-[0-9]*.safetensors"))
