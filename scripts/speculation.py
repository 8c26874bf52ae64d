"""What speculation must not change: greedy texts are equal (float32), and sampled ones come from the same distribution.

`python scripts/speculation.py --engine vllm exact` and `... sampled` start a stock server and one that drafts with
Medusa heads, one after the other, both serving the embedded model in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.heldout import ALL
from chunkllm_bridge.client import Client
from scripts.model import build
from scripts.serve import run, wait_ready
from tests.support.server import ENGINES, Server, ServerError

TOKENS = 128
LENGTHS = (TOKENS, 97, 128, 31, 111, 128, 5, 64)  # mixed: requests join and leave a batch that others are in
DRAFTS = 5
CACHING = {  # prefix caches are on by default; prompts are prefilled in chunks
    "vllm": ("--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
    "sglang": ("--chunked-prefill-size", "64", "--max-running-requests", "16"),
}
SAMPLED = (  # the first few tokens of each are open, but not wide open
    "The capital of France is",
    "Once upon a time, there was a",
    "def add(a, b):\n    return",
    "My favourite colour is",
)
WHOLE = 5  # tokens of each sample
COMPARED = (slice(1, 2), slice(2, 3), slice(0, 2), slice(0, 3))  # what follows a draft alone, and with what is before
AT_ONCE = 32
T = TypeVar("T")


def served(engine: str, console: Console, *extra: str, job: Callable[[Server], T]) -> T:
    args = [*ENGINES[engine].exact, "--served-model-name", "model", *extra]
    server = Server(build(), args, engine=engine, env=ENGINES[engine].quick, timeout=600)
    server.start()
    try:
        wait_ready(server, console)
        return job(server)
    finally:
        server.stop()


def with_medusa(*sets: str) -> list[str]:
    pairs = ("speculative.plugin=medusa", "plugin.latency.p99=10s", *sets)
    return ["--plugin", "chunkllm", *(word for pair in pairs for word in ("--plugin-set", pair))]


# ---- greedy ----------------------------------------------------------------------------------------------------------


async def _answer(client: AsyncOpenAI, prompt: str, tokens: int) -> str:
    asked: Any = {"role": "user", "content": prompt}
    answer = await client.chat.completions.create(
        model="model", messages=[asked], max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].message.content)


async def answers(server: Server, wishes: Sequence[tuple[str, int]], streams: int) -> list[str]:
    """The text of each (prompt, tokens), so many at once."""
    gate = asyncio.Semaphore(streams)

    async def ask(prompt: str, tokens: int) -> str:
        async with gate:
            return await _answer(client, prompt, tokens)

    async with server.async_openai() as client:
        return list(await asyncio.gather(*(ask(*wish) for wish in wishes)))


def exact(engine: str, console: Console) -> None:
    wishes = list(zip(ALL, itertools.cycle(LENGTHS), strict=False))
    whole = [(prompt, TOKENS) for prompt in ALL]
    plain = served(engine, console, *CACHING[engine], job=lambda server: asyncio.run(answers(server, whole, 8)))
    lost = 0
    shown = Table("streams", "drafts", "prompts", "tokens", "equal", "acceptance length", title=f"{engine}, float32")

    def row(streams: int, drafts: str, wishes: Sequence[tuple[str, int]], texts: Sequence[str], length: float) -> None:
        nonlocal lost
        triples = zip(wishes, texts, plain, strict=True)
        same = [text == full or (n < TOKENS and full.startswith(text)) for (_, n), text, full in triples]
        lost += same.count(False)
        tokens = f"{min(n for _, n in wishes)}-{max(n for _, n in wishes)}"
        shown.add_row(str(streams), drafts, str(len(wishes)), tokens, f"{sum(same)} of {len(same)}", f"{length:.2f}")

    def compared(server: Server) -> None:
        control = Client(server.url)

        def accepted_since(before: dict[str, Any]) -> float:
            now = control.get("status")["speculation"]
            drafts = now["drafts"] - before["drafts"]
            return 1 + (now["accepted"] - before["accepted"]) / drafts if drafts else 0.0

        for drafts in range(1, DRAFTS + 1):
            control.set({"speculative.tokens": drafts})
            before = control.get("status")["speculation"]
            row(8, str(drafts), wishes, asyncio.run(answers(server, wishes, 8)), accepted_since(before))
            console.print(f"8 streams, {drafts} draft tokens: done")
        before, texts = control.get("status")["speculation"], []
        for index, prompt in enumerate(track(ALL, "1 stream", console=console)):
            control.set({"speculative.tokens": index % DRAFTS + 1})
            texts += asyncio.run(answers(server, [(prompt, TOKENS)], 1))
        row(1, f"1-{DRAFTS} in turn", whole, texts, accepted_since(before))

    served(
        engine,
        console,
        *CACHING[engine],
        *with_medusa(f"speculative.tokens={DRAFTS}", "plugins.medusa.adaptive=false"),
        job=compared,
    )
    console.print(shown)
    if lost:
        raise ServerError(f"speculation changed {lost} texts")


# ---- sampled ---------------------------------------------------------------------------------------------------------


Tokens = tuple[str, ...]


async def _samples(server: Server, prompt: str, number: int) -> list[Tokens]:
    """`number` answers of WHOLE tokens, AT_ONCE at a time."""
    seen: list[Tokens] = []
    asked: Any = {"model": "model", "prompt": prompt, "max_tokens": WHOLE, "temperature": 0.8, "logprobs": 1}
    async with server.async_openai(timeout=600) as client:
        while len(seen) < number:
            answers = await asyncio.gather(
                *(client.completions.create(**asked, extra_body={"ignore_eos": True}) for _ in range(AT_ONCE))
            )
            for answer in answers:
                found = answer.choices[0].logprobs
                if found is None or len(found.tokens or ()) != WHOLE:
                    raise ServerError(f"{server.url} gave no {WHOLE} tokens: {answer.choices[0]}")
                seen.append(tuple(found.tokens or ()))
    return seen[:number]


def p_value(one: Counter[Any], other: Counter[Any]) -> tuple[float, float, int]:
    """(chi-square, p, degrees of freedom) of two samples; classes that were seen less than ten times are one class."""
    import torch

    both = one + other
    classes = [each for each, count in both.items() if count >= 10]
    rows = [(one[each], other[each]) for each in classes]
    rest = (one.total() - sum(a for a, _ in rows), other.total() - sum(b for _, b in rows))
    rows += [rest] if sum(rest) else []
    shares = (one.total() / both.total(), other.total() / both.total())
    statistic = sum(
        (seen - sum(row) * share) ** 2 / (sum(row) * share)
        for row in rows
        for seen, share in zip(row, shares, strict=True)
    )
    degrees = max(1, len(rows) - 1)
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half[0], half[1])), degrees


def sampled(engine: str, console: Console, number: int = 2000) -> None:
    """The first token of an answer comes from the prefill; those after it from steps that verify drafts."""

    def taken(server: Server) -> list[list[Tokens]]:
        return [
            asyncio.run(_samples(server, prompt, number))
            for prompt in track(SAMPLED, f"{number} samples each", console=console)
        ]

    extra = ("--max-num-seqs" if engine == "vllm" else "--max-running-requests", str(AT_ONCE))
    plain = served(engine, console, *extra, job=taken)
    status: dict[str, Any] = {}

    def drafted(server: Server) -> list[list[Tokens]]:
        samples = taken(server)
        status.update(Client(server.url).get("status")["speculation"])
        return samples

    ours = served(engine, console, *extra, *with_medusa("plugins.medusa.adaptive=false"), job=drafted)
    title = f"{engine}, T = 0.8, {number} each"
    shown = Table("prompt", "tokens", "classes", "chi-square", "degrees", "p", title=title)
    worst, tests = 1.0, list(itertools.product(range(len(SAMPLED)), COMPARED))
    for index, places in tests:
        one, other = (Counter(tokens[places] for tokens in samples[index]) for samples in (plain, ours))
        statistic, p, degrees = p_value(one, other)
        worst = min(worst, p)
        tokens = f"{places.start + 1} to {places.stop}" if places.stop - places.start > 1 else str(places.stop)
        shown.add_row(repr(SAMPLED[index]), tokens, str(len(one | other)), f"{statistic:.1f}", str(degrees), f"{p:.3f}")
    console.print(shown)
    console.print(f"{status['drafts']} drafts, acceptance length {status['acceptance_length_total']:.2f}")
    if worst < 0.01 / len(tests):  # Bonferroni: one false alarm in a hundred runs
        raise ServerError(f"the distributions differ: p = {worst:.2g}")


JOBS = {"exact": exact, "sampled": sampled}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what an engine says with speculation and without.")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("job", choices=JOBS)
    options = parser.parse_args()
    return run(lambda console: JOBS[options.job](options.engine, console))


if __name__ == "__main__":
    sys.exit(main())
