"""Two servers that are up at once and driven in turn: while one is measured, the other stands still.

Two processes of the same program differ by a percent or two all their lives; therefore there are rounds, each with
fresh servers, started in the other order than in the round before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import httpx
from rich.console import Console
from rich.table import Table

from bench.paired import Pair, Summary, summarize
from bench.quiet import watching
from tests.support.server import Server, ServerError

WANTED = 0.01  # half the width of the interval of a median: narrow enough to stop
DISTURBED = 0.15  # cores busy with something else: a pair that saw more is left out, if most did not
WAKE_TOKENS = 8
PROMPTS = (
    "The history of the bicycle begins in",
    "Once upon a time, in a village by the sea,",
    "To make a good loaf of bread, first",
    "The three most important ideas in physics are",
    "Dear friend, I am writing to you because",
    "A computer works by",
    "In the forest there lived an old owl who",
    "The best way to learn a language is",
)


# -- one run -----------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Speed:
    """`rate`: output tokens per second of all streams together. `steps`: engine steps per second, by the median gap
    between a stream's tokens, which a hiccup of the machine does not move."""

    rate: float
    steps: float


async def drive(server: Server, streams: int, tokens: int) -> Speed:
    """That many streams at once, each of exactly that many tokens."""
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0) as client:
        started = time.perf_counter()
        arrivals = await asyncio.gather(*(_stream(client, prompt, tokens) for prompt in PROMPTS[:streams]))
        seconds = time.perf_counter() - started
    gaps = [later - earlier for times in arrivals for earlier, later in itertools.pairwise(times)]
    return Speed(rate=streams * tokens / seconds, steps=1 / statistics.median(gaps))


async def _stream(client: httpx.AsyncClient, prompt: str, tokens: int) -> list[float]:
    """Read one stream to its end; returns when each chunk came. Only the last is parsed: the cores are shared."""
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    times, last = [], ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = line
                times.append(time.perf_counter())
    made = json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]
    if made != tokens:
        raise ServerError(f"{client.base_url} made {made} tokens instead of {tokens}")
    return times[:-1]  # the last chunk is the usage


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Let none of a server's processes run: an idle worker spins for a second, and an idle bridge is polled."""
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)


# -- pairs -------------------------------------------------------------------------------------------------------------


@attrs.define
class Pairs:
    """All that was taken at one number of streams."""

    rate: list[Pair] = attrs.field(factory=list)
    steps: list[Pair] = attrs.field(factory=list)
    others: list[float] = attrs.field(factory=list)  # cores that something else kept busy, per pair

    @property
    def disturbed(self) -> int:
        return sum(others > DISTURBED for others in self.others)

    def settle(self) -> int:
        """Leave the disturbed pairs out, unless they are most of all, or too few remain. Returns how many were left
        out."""
        left_out = self.disturbed
        if not left_out or len(self.others) - left_out < max(2, left_out):
            return 0
        quiet = [index for index, others in enumerate(self.others) if others <= DISTURBED]
        self.rate, self.steps = [self.rate[index] for index in quiet], [self.steps[index] for index in quiet]
        self.others = [self.others[index] for index in quiet]
        return left_out

    def summary(self, what: str) -> Summary:
        return summarize([pair.ratio for pair in getattr(self, what)])

    @property
    def narrow(self) -> bool:
        return len(self.rate) > 1 and self.summary("rate").half_width <= WANTED


@attrs.frozen
class Names:
    """What the two are called: the one above the fraction bar comes second."""

    baseline: str
    candidate: str


def take(servers: Sequence[Server], names: Names, streams: int, tokens: int, *, in_order: bool, into: Pairs) -> str:
    """One run on each of (baseline, candidate), woken by a short one, while the other stands still; in words."""
    speeds, others = {}, 0.0
    groups = {server.process.pid for server in servers}
    for server, other in itertools.permutations(servers if in_order else servers[::-1]):
        with stopped(other), watching(groups) as watch:
            asyncio.run(drive(server, streams, WAKE_TOKENS))
            speeds[server.url] = asyncio.run(drive(server, streams, tokens))
        others = max(others, watch.others)
    a, b = (speeds[server.url] for server in servers)
    into.others.append(others)
    into.rate.append(Pair(baseline=a.rate, candidate=b.rate, baseline_first=in_order))
    into.steps.append(Pair(baseline=a.steps, candidate=b.steps, baseline_first=in_order))
    noise = f", {others:.2f} cores were busy with something else" if others > DISTURBED else ""
    both = f"{names.baseline} {a.rate:7.2f}, {names.candidate} {b.rate:7.2f} tokens/s"
    return f"{streams} stream(s): {both}, ratio {b.rate / a.rate:.4f}{noise}"


Contestants = Callable[[bool], AbstractContextManager[Sequence[Server]]]
"""Baseline and candidate, both up and warm, for as long as it lasts; told whether the baseline is to start first."""


def compare(
    contestants: Contestants,
    names: Names,
    options: argparse.Namespace,
    console: Console,
    *,
    take: Callable[..., str] = take,
    pairs: type[Pairs] = Pairs,
) -> dict[int, Pairs]:
    """Rounds of pairs, until every interval is narrow enough after an even number of rounds, or all are done."""
    taken = {streams: pairs() for streams in options.streams}
    for number in range(options.rounds):
        console.print(f"round {number + 1} of at most {options.rounds}: starting two servers")
        with contestants(number % 2 == 0) as servers:
            deadline = time.monotonic() + 60 * options.minutes / options.rounds
            for turn in itertools.count():
                for streams, into in taken.items():
                    words = take(servers, names, streams, options.tokens, in_order=turn % 2 == 0, into=into)
                    console.print(f"  {words}", soft_wrap=True)
                if time.monotonic() > deadline:
                    break
        if number % 2 and all(into.narrow for into in taken.values()):
            break
    return taken


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int, minutes: float) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--tokens", type=int, default=48, help="output tokens per stream and run")
    parser.add_argument("--rounds", type=int, default=rounds, help="with fresh servers each; an even number is fair")
    parser.add_argument("--minutes", type=float, default=minutes, help="time for pairs, in all rounds together")


# -- the report --------------------------------------------------------------------------------------------------------


def table(taken: Mapping[int, Pairs], names: Names, title: str) -> Table:
    heads = ("", "pairs", names.baseline, names.candidate, "ratio", "quartiles", "95 % interval")
    shown = Table(*heads, title=title)
    for streams, pairs in taken.items():
        for what, label in (("rate", "tokens/s"), ("steps", "steps/s")):
            summary, observed = pairs.summary(what), getattr(pairs, what)
            shown.add_row(
                f"{label}, {streams} stream(s)",
                str(summary.n),
                f"{statistics.median(pair.baseline for pair in observed):.2f}",
                f"{statistics.median(pair.candidate for pair in observed):.2f}",
                f"{summary.median:.4f}",
                f"{summary.lower_quartile:.3f}-{summary.upper_quartile:.3f}",
                f"{summary.low:.4f}-{summary.high:.4f}",
            )
    return shown


def metrics(taken: Mapping[int, Pairs]) -> dict[str, float]:
    return {f"tps_ratio_{streams}": round(pairs.summary("rate").median, 5) for streams, pairs in taken.items()}


def detail(taken: Mapping[int, Pairs], names: Names) -> dict[str, Any]:
    return {
        str(streams): {
            f"{names.baseline}_tps": statistics.median(pair.baseline for pair in pairs.rate),
            f"{names.candidate}_tps": statistics.median(pair.candidate for pair in pairs.rate),
            "tps_ratio": attrs.asdict(pairs.summary("rate")),
            "step_ratio": attrs.asdict(pairs.summary("steps")),
            "disturbed_pairs_kept": pairs.disturbed,
            "pairs": [attrs.asdict(pair) | {"ratio": pair.ratio} for pair in pairs.rate],
        }
        for streams, pairs in taken.items()
    }


def finish(taken: Mapping[int, Pairs], names: Names, title: str, console: Console) -> None:
    """Leave disturbed pairs out, and show the rest."""
    seen = sum(pairs.disturbed for pairs in taken.values())
    left_out = sum(pairs.settle() for pairs in taken.values())
    console.print(table(taken, names, title))
    if seen:
        console.print(f"{seen} pairs were disturbed by something else; {left_out} were left out")
