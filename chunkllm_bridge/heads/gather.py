"""The first stage: shards of what the model says, made once and kept in the work folder, so that a run can go on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from chunkllm_bridge.common.errors import ConfigError, Problem
from chunkllm_bridge.heads import generate, invent
from chunkllm_bridge.heads.generate import Asked
from chunkllm_bridge.heads.prompts import Prompt, held_out, training

INVENTED = "invented.json"
DRAWN = 0.2  # share of the prompts answered at TEMPERATURE
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


def prompts(
    model: Any,
    tokenizer: Any,
    first: Sequence[Asked],
    work: Path,
    *,
    count: int,
    batch: int,
    seed: int,
    watch: Callable[[int], Callable[[int], None]],
) -> list[Asked]:
    """`count` prompts: those of files, the built-in ones, and as many as are missing made up by the model itself.

    `DRAWN` of them are to be answered at `TEMPERATURE`, the others greedily. `watch` is told how many tokens will be
    made up, and answers who hears of them. What was made up is kept in the work folder.
    """
    own = [Asked(group=prompt.group, tokens=prompt.tokens(tokenizer)) for prompt in training(seed)]
    pool = [*first, *own][:count]
    if missing := count - len(pool):
        file = work / INVENTED
        if not file.exists():
            heard = watch(missing * invent.LENGTH)
            made = invent.invent(model, tokenizer, missing, batch=batch, seed=seed, step=heard)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps([each.tokens for each in made]), encoding="utf-8")
            partial.replace(file)
        rows = json.loads(file.read_text(encoding="utf-8"))
        pool += [Asked(group="invented", tokens=tokens) for tokens in rows]
    chance = random.Random(seed)
    return [attrs.evolve(each, temperature=TEMPERATURE if chance.random() < DRAWN else 0.0) for each in pool]


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
