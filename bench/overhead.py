"""What the bridge costs: one engine with it and one without, driven in turn (`make bench-overhead ENGINE=vllm`).

Both servers are up at once and one is driven at a time, so that runs alternate quickly. Two processes of the same
program differ by a percent or two all their lives; therefore there are rounds, each with fresh servers, started in
the other order than in the round before. `--control` puts stock against stock: what the method itself gets wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
from rich.console import Console
from rich.table import Table

from bench.paired import Pair, Summary, provenance, summarize
from bench.quiet import watching
from chunkllm_bridge.client import Client
from scripts.model import build
from scripts.serve import run
from tests.support.server import ENGINES, Server, ServerError

OUT = Path(__file__).parent / "out"
POOL_BYTES = 2**30  # what ENGINES gives a stock server on a CPU
WANTED = 0.01  # half the width of the interval of a median: narrow enough to stop
DISTURBED = 0.15  # cores busy with something else: a pair that saw more is left out, if most did not
WAKE_TOKENS = 8
QUOTA = 0.9  # of the pool
# Let both start from the same hashes, and have their weights in large pages.
SAME_LUCK = {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ARGS = {
    "vllm": "--dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --enforce-eager --disable-uvicorn-access-log",
}
DISTRIBUTIONS = {"vllm": ("vllm", "torch", "transformers", "chunkllm-bridge")}
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
        """Leave the disturbed pairs out, unless they are most of all. Returns how many were left out."""
        if not (left_out := self.disturbed) or left_out > len(self.others) // 2:
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


def take(stock: Server, bridge: Server, streams: int, tokens: int, *, stock_first: bool, into: Pairs) -> str:
    """One run on each, woken by a short one, while the other stands still. Returns it in words."""
    speeds, others = {}, 0.0
    for server, other in ((stock, bridge), (bridge, stock))[:: 1 if stock_first else -1]:
        with stopped(other), watching({stock.process.pid, bridge.process.pid}) as watch:
            asyncio.run(drive(server, streams, WAKE_TOKENS))
            speeds[server.url] = asyncio.run(drive(server, streams, tokens))
        others = max(others, watch.others)
    a, b = speeds[stock.url], speeds[bridge.url]
    into.others.append(others)
    into.rate.append(Pair(baseline=a.rate, candidate=b.rate, baseline_first=stock_first))
    into.steps.append(Pair(baseline=a.steps, candidate=b.steps, baseline_first=stock_first))
    noise = f", {others:.2f} cores were busy with something else" if others > DISTURBED else ""
    ratio = f"ratio {b.rate / a.rate:.4f}{noise}"
    return f"{streams} stream(s): stock {a.rate:7.2f}, bridge {b.rate:7.2f} tokens/s, {ratio}"


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Let none of a server's processes run: an idle worker spins for a second, and an idle bridge is polled."""
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)


def bridge_args() -> list[str]:
    """The bridge with a pool of the stock size; `contestants` puts a quota in force, and status and metrics are on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ["--plugin", "chunkllm", "--plugin-set", f"kv_cache.memory_ratio={POOL_BYTES / memory:.6f}"]


@contextmanager
def contestants(options: argparse.Namespace, *, stock_first: bool) -> Iterator[tuple[Server, Server]]:
    """A stock server and one with the bridge, both up, started one after the other."""
    args = ["--served-model-name", "model", *ARGS[options.engine].split()]
    extra = [] if options.control else bridge_args()
    stock = Server(build(), args, engine=options.engine, env=SAME_LUCK)
    bridge = Server(build(), [*args, *extra], engine=options.engine, env=SAME_LUCK)
    with ExitStack() as servers:
        for server in (stock, bridge) if stock_first else (bridge, stock):
            servers.enter_context(server)
        if not options.control and "chunkllm_" not in httpx.get(f"{bridge.url}/metrics").text:
            raise ServerError(f"no chunkllm_ metrics: the bridge is not attached\n{bridge.tail()}")
        if not options.control:  # a quota below the pool, so that each allocation goes through it; it refuses none
            control = Client(bridge.url)
            control.set({"kv_cache.memory_ratio": QUOTA * control.get("status")["kv"]["memory_ratio_max"]})
        for server, streams in itertools.product((stock, bridge), options.streams):  # fills caches
            asyncio.run(drive(server, streams, options.tokens))
        yield stock, bridge


def compare(options: argparse.Namespace, console: Console) -> dict[int, Pairs]:
    """Rounds of pairs, until every interval is narrow enough after an even number of rounds, or all are done."""
    taken = {streams: Pairs() for streams in options.streams}
    for number in range(options.rounds):
        console.print(f"round {number + 1} of at most {options.rounds}: starting two servers")
        with contestants(options, stock_first=number % 2 == 0) as (stock, bridge):
            deadline = time.monotonic() + 60 * options.minutes / options.rounds
            for turn in itertools.count():
                for streams, pairs in taken.items():
                    words = take(stock, bridge, streams, options.tokens, stock_first=turn % 2 == 0, into=pairs)
                    console.print(f"  {words}", soft_wrap=True)
                if time.monotonic() > deadline:
                    break
        if number % 2 and all(pairs.narrow for pairs in taken.values()):
            break
    return taken


# -- the report --------------------------------------------------------------------------------------------------------


def table(taken: Mapping[int, Pairs], title: str) -> Table:
    shown = Table("", "pairs", "stock", "bridge", "ratio", "quartiles", "95 % interval", title=title)
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


def result(taken: Mapping[int, Pairs], options: argparse.Namespace) -> dict[str, Any]:
    detail = {
        str(streams): {
            "stock_tps": statistics.median(pair.baseline for pair in pairs.rate),
            "bridge_tps": statistics.median(pair.candidate for pair in pairs.rate),
            "tps_ratio": attrs.asdict(pairs.summary("rate")),
            "step_ratio": attrs.asdict(pairs.summary("steps")),
            "disturbed_pairs_kept": pairs.disturbed,
            "pairs": [attrs.asdict(pair) | {"ratio": pair.ratio} for pair in pairs.rate],
        }
        for streams, pairs in taken.items()
    }
    return {
        "metrics": {f"tps_ratio_{streams}": round(pairs.summary("rate").median, 5) for streams, pairs in taken.items()},
        "detail": {"streams": detail, "tokens": options.tokens, "args": ARGS[options.engine], "model": "smollm2-135m"},
        "provenance": provenance(*DISTRIBUTIONS[options.engine]),
    }


def benchmark(options: argparse.Namespace, console: Console) -> None:
    taken = compare(options, console)
    seen = {streams: pairs.disturbed for streams, pairs in taken.items()}
    left_out = sum(pairs.settle() for pairs in taken.values())
    kind = "control" if options.control else "overhead"
    console.print(
        table(taken, f"{options.engine}, {kind}: bridge against stock, medians of pairs"), width=120, crop=False
    )
    if any(seen.values()):
        console.print(f"{sum(seen.values())} pairs were disturbed by something else; {left_out} were left out")
    path = OUT / f"{kind}-{options.engine}.json"
    path.write_text(json.dumps(result(taken, options), indent=2) + "\n")
    console.print(f"wrote bench/out/{path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a stock engine with one that has the bridge attached.")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--tokens", type=int, default=48, help="output tokens per stream and run")
    parser.add_argument("--rounds", type=int, default=4, help="with fresh servers each; an even number is fair")
    parser.add_argument("--minutes", type=float, default=6.0, help="time for pairs, in all rounds together")
    parser.add_argument("--control", action="store_true", help="stock against stock")
    options = parser.parse_args()
    return run(lambda console: benchmark(options, console))


if __name__ == "__main__":
    sys.exit(main())
