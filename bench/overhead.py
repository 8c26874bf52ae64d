"""What the bridge costs: one engine with it and one without, driven in turn (`make bench-overhead ENGINE=vllm`).

Both servers are up at once and only one is driven at a time: an idle one costs next to nothing, and so runs can
alternate quickly. Pairs are taken until the interval of every median is narrow enough, or time is up. `--control`
puts two stock servers against each other: what the method itself gets wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import httpx
from rich.console import Console
from rich.table import Table

from bench.paired import Pair, Summary, provenance, summarize
from bench.quiet import watching
from scripts.model import build
from scripts.serve import run
from tests.support.server import ENGINES, Server, ServerError

OUT = Path(__file__).parent / "out"
POOL_BYTES = 2**30  # what ENGINES gives a stock server on a CPU
WANTED = 0.01  # half the width of the interval of a median
LEAST_PAIRS = 8
WAKE_TOKENS = 8
DISTURBED = 0.1  # cores that may be busy with something else while a pair is run
REST = 1.5  # seconds: a vLLM worker spins for one second after its last step, on the core that both use
ARGS = {
    "vllm": "--dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --enforce-eager --disable-uvicorn-access-log",
}
# Two processes of the same program differ by a few percent through where their hashes and pages fall.
SAME_LUCK = {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
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


def bridge_args() -> list[str]:
    """The bridge with its quota at the size of the stock pool, status and metrics on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ["--plugin", "chunkllm", "--plugin-set", f"kv_cache.memory_ratio={POOL_BYTES / memory:.6f}"]


async def rate(server: Server, streams: int, tokens: int) -> float:
    """Output tokens per second of that many streams, each of exactly that many tokens."""
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(*(_stream(client, prompt, tokens) for prompt in PROMPTS[:streams]))
        seconds = time.perf_counter() - started
    if counts != [tokens] * streams:
        raise ServerError(f"{server.url} gave {counts} tokens instead of {tokens} per stream\n{server.tail()}")
    return streams * tokens / seconds


async def _stream(client: httpx.AsyncClient, prompt: str, tokens: int) -> int:
    """Read one stream to its end; returns the number of tokens the server says it made."""
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    last = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = line  # only the last one, which has the usage, is parsed: the client shares the cores
    return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


@attrs.frozen
class Contest:
    """Two servers that are up, and how they are driven."""

    stock: Server
    bridge: Server
    tokens: int

    def pair(self, streams: int, *, stock_first: bool) -> tuple[Pair, float]:
        """One run on each, after the other has come to rest and this one has been woken by a short run.

        Also returns how many cores were busy with something else meanwhile.
        """
        rates, others = {}, 0.0
        for server in (self.stock, self.bridge) if stock_first else (self.bridge, self.stock):
            time.sleep(REST)
            asyncio.run(rate(server, streams, WAKE_TOKENS))
            with watching({self.stock.process.pid, self.bridge.process.pid}) as watch:
                rates[server.url] = asyncio.run(rate(server, streams, self.tokens))
            others = max(others, watch.others)
        pair = Pair(baseline=rates[self.stock.url], candidate=rates[self.bridge.url], baseline_first=stock_first)
        return pair, others

    def measure(self, pairs: dict[int, list[Pair]], minutes: float, console: Console) -> int:
        """Add pairs for that long, the numbers of streams in turn. Returns how many were disturbed and left out."""
        for streams in pairs:  # the first requests compile and fill caches
            self.pair(streams, stock_first=True)
        deadline = time.monotonic() + 60 * minutes
        disturbed = 0
        for number in itertools.count():
            for streams, taken in pairs.items():
                pair, others = self.pair(streams, stock_first=number % 2 == 0)
                quiet = others <= DISTURBED
                words = f"stock {pair.baseline:7.2f}  bridge {pair.candidate:7.2f} tokens/s  ratio {pair.ratio:.4f}"
                console.print(
                    f"  {streams} stream(s): {words}{'' if quiet else f'  left out: {others:.2f} cores busy'}"
                )
                if quiet:
                    taken.append(pair)
                disturbed += not quiet
            if time.monotonic() > deadline:
                return disturbed
        raise AssertionError("itertools.count ends")


def check_attached(bridge: Server) -> None:
    """A comparison with a bridge that is not in says nothing."""
    if "chunkllm_" not in httpx.get(f"{bridge.url}/metrics").text:
        raise ServerError(f"no chunkllm_ metrics: the bridge is not attached\n{bridge.tail()}")


def report(pairs: Mapping[int, list[Pair]], summaries: Mapping[int, Summary], title: str) -> Table:
    table = Table("streams", "pairs", "stock", "bridge", "ratio", "quartiles", "95 % interval", title=title)
    for streams, summary in summaries.items():
        table.add_row(
            str(streams),
            str(summary.n),
            f"{statistics.median(p.baseline for p in pairs[streams]):.2f}",
            f"{statistics.median(p.candidate for p in pairs[streams]):.2f}",
            f"{summary.median:.4f}",
            f"{summary.lower_quartile:.3f} - {summary.upper_quartile:.3f}",
            f"{summary.low:.4f} - {summary.high:.4f}",
        )
    return table


def result(
    pairs: Mapping[int, list[Pair]], summaries: Mapping[int, Summary], options: argparse.Namespace
) -> dict[str, Any]:
    detail = {
        str(streams): {
            "stock_tps": statistics.median(p.baseline for p in taken),
            "bridge_tps": statistics.median(p.candidate for p in taken),
            "ratio": attrs.asdict(summaries[streams]),
            "pairs": [attrs.asdict(p) | {"ratio": p.ratio} for p in taken],
        }
        for streams, taken in pairs.items()
    }
    return {
        "metrics": {f"tps_ratio_{streams}": round(summary.median, 5) for streams, summary in summaries.items()},
        "detail": {"streams": detail, "tokens": options.tokens, "args": ARGS[options.engine], "model": "smollm2-135m"},
        "provenance": provenance(*DISTRIBUTIONS[options.engine]),
    }


def compare(options: argparse.Namespace, console: Console) -> None:
    model, args = build(), ["--served-model-name", "model", *ARGS[options.engine].split()]
    extra = [] if options.control else bridge_args()
    stock = Server(model, args, engine=options.engine, env=SAME_LUCK)
    bridge = Server(model, [*args, *extra], engine=options.engine, env=SAME_LUCK)
    console.print("starting two servers, one after the other")
    with ExitStack() as servers:
        for server in (stock, bridge):
            servers.enter_context(server)
        pairs = measure(stock, bridge, options, console)
        if not options.control:
            check_attached(bridge)
    summaries = {streams: summarize([p.ratio for p in taken]) for streams, taken in pairs.items()}
    kind = "control" if options.control else "overhead"
    console.print(report(pairs, summaries, f"{options.engine}, {kind}: output tokens per second"))
    path = OUT / f"{kind}-{options.engine}.json"
    path.write_text(json.dumps(result(pairs, summaries, options), indent=2) + "\n")
    console.print(f"wrote bench/out/{path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a stock engine with one that has the bridge attached.")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--tokens", type=int, default=48, help="output tokens per stream and run")
    parser.add_argument("--pairs", type=int, default=200, help="take no more pairs than this")
    parser.add_argument("--minutes", type=float, default=15.0, help="stop taking pairs after this time")
    parser.add_argument("--control", action="store_true", help="stock against stock")
    options = parser.parse_args()
    return run(lambda console: compare(options, console))


if __name__ == "__main__":
    sys.exit(main())
