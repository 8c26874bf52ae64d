"""The same prompts on the stock engines and with the bridge, float32 and greedy: which texts are equal.

`python scripts/parity.py` starts four servers, one after the other, each from its engine's own environment. It exits 0
only if the bridge changed no text; the engines may differ from each other where two tokens are as good as equal.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.envs import ROOT
from scripts.model import build
from scripts.serve import SPEC, run, wait_ready
from tests.support.server import ENGINES, Server, ServerError

TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "To make a good loaf of bread, first",
    "The three most important ideas in physics are",
    "Dear friend, I am writing to you because",
    "A computer works by",
    "In the forest there lived an old owl who",
    "The best way to learn a language is",
    "The history of the bicycle begins in",
    "def fibonacci(n):",
    "Water boils at a lower temperature on a mountain because",
    "My favourite season is autumn, when",
    "The difference between a frog and a toad is",
    "Ten rules for a tidy kitchen:\n1.",
    "Question: What is a prime number?\nAnswer:",
    "The moon is smaller than the earth, but",
)


async def ask(server: Server, prompts: Sequence[str], tokens: int) -> list[str]:
    """The text of each, all at once, of exactly that many tokens."""
    async with server.async_openai() as client:
        asked = (
            client.completions.create(
                model=server.model, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
            )
            for prompt in prompts
        )
        answers = await asyncio.gather(*asked)
    return [answer.choices[0].text for answer in answers]


def texts(engine: str, prompts: Sequence[str], tokens: int, console: Console, *, bridge: bool) -> list[str]:
    """What an engine answers, with the bridge or without, on a server of its own."""
    plugin = ("--plugin", "chunkllm", "--plugin-config", str(SPEC)) if bridge else ()
    server = Server(
        build(),
        [*ENGINES[engine].exact, *plugin],
        engine=engine,
        home=ROOT / ".envs" / engine,
        env=ENGINES[engine].quick,
        timeout=600,
    )
    console.print(f"[bold]{engine}, {'with the bridge' if bridge else 'stock'}[/bold]")
    server.start()
    try:
        wait_ready(server, console)
        return asyncio.run(ask(server, prompts, tokens))
    finally:
        server.stop()


def verdict(one: str, other: str) -> str:
    if one == other:
        return "equal"
    return f"differ from character {next(i for i in range(len(one) + 1) if one[: i + 1] != other[: i + 1])}"


def side_by_side(console: Console, *, prompts: Sequence[str] = PROMPTS[:6], tokens: int = 40) -> None:
    """`make demo ENGINE=both`: one spec file, both engines, their texts beside each other."""
    answers = {engine: texts(engine, prompts, tokens, console, bridge=True) for engine in ENGINES}
    shown = Table("prompt", *answers, "", title=f"{SPEC.name} on both engines, float32, greedy", show_lines=True)
    verdicts = [verdict(*row) for row in zip(*answers.values(), strict=True)]
    for row in zip(prompts, *answers.values(), verdicts, strict=True):
        shown.add_row(*(Text(text.strip().replace("\n", " ")) for text in row))
    console.print(shown)
    console.print(f"{verdicts.count('equal')} of {len(prompts)} texts are equal")


def parity(console: Console) -> None:
    stock = {engine: texts(engine, PROMPTS, TOKENS, console, bridge=False) for engine in ENGINES}
    ours = {engine: texts(engine, PROMPTS, TOKENS, console, bridge=True) for engine in ENGINES}
    shown = Table("prompt", *(f"{engine}: bridge and stock" for engine in ENGINES), " and ".join(ENGINES))
    columns = [[verdict(*pair) for pair in zip(stock[engine], ours[engine], strict=True)] for engine in ENGINES]
    columns.append([verdict(*pair) for pair in zip(*ours.values(), strict=True)])
    for prompt, *verdicts in zip(PROMPTS, *columns, strict=True):
        shown.add_row(Text(prompt.replace("\n", " ")), *verdicts)
    counts = [column.count("equal") for column in columns]
    shown.add_section()
    shown.add_row("equal", *(f"{count} of {len(PROMPTS)}" for count in counts))
    console.print(shown)
    if counts[:-1] != [len(PROMPTS)] * len(ENGINES):
        raise ServerError("the bridge changed a text")


if __name__ == "__main__":
    sys.exit(run(parity))
