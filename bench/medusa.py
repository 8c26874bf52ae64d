"""Medusa heads against the stock engine, one server of each, driven in turn (`make bench-medusa ENGINE=vllm`).

The stock engine runs as it does best, without the bridge and with its own scheduling; the other one has the bridge with
`speculative.plugin = "medusa"`; with `--off` that is turned off once it is warm: what a launch that could speculate
costs while it does not. Chat completions of prompts that the heads never saw (`bench/heldout.py`), greedy, of a
fixed length.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
from rich.console import Console

from bench.heldout import ALL
from bench.overhead import DISTRIBUTIONS, SAME_LUCK
from bench.paired import Pair, provenance, summarize
from bench.quiet import watching
from bench.turns import WAKE_TOKENS, Names, Pairs, compare, detail, finish, stopped
from chunkllm_bridge.client import Client
from scripts.model import build
from scripts.serve import run
from tests.support.server import ENGINES, Server, ServerError

OUT = Path(__file__).parent / "out"
ARGS = {
    "vllm": "--dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --disable-uvicorn-access-log",
    "sglang": "--dtype bfloat16 --context-length 1024 --max-running-requests 8 --max-total-tokens 46592 "
    "--log-level-http warning",
}
BRIDGE = ("--plugin", "chunkllm", "--plugin-set", "speculative.plugin=medusa")
NAMES = Names("without", "medusa")
TURNS = 3  # prompts that each of several streams answers in a run
WARM = 2  # runs of each kind before anything is measured: shapes are compiled as they come up


@attrs.frozen(kw_only=True)
class Run:
    """`rate`: output tokens per second of all streams together. `itl`: seconds per output token of one stream, after
    its first: the mean time between two tokens where several may come at once."""

    rate: float
    itl: float


async def drive(server: Server, prompts: Sequence[str], tokens: int, streams: int) -> Run:
    """So many prompts at once until all are answered, each with exactly so many tokens."""
    left = iter(prompts)

    async def stream(client: httpx.AsyncClient) -> list[float]:
        return [await _answer(client, prompt, tokens) for prompt in left]

    async with httpx.AsyncClient(base_url=server.url, timeout=600.0) as client:
        started = time.perf_counter()
        itls = await asyncio.gather(*(stream(client) for _ in range(streams)))
        seconds = time.perf_counter() - started
    return Run(rate=len(prompts) * tokens / seconds, itl=statistics.median(itertools.chain(*itls)))


async def _answer(client: httpx.AsyncClient, prompt: str, tokens: int) -> float:
    """Read one answer to its end; seconds per token after the first chunk. The last line says how many there were."""
    body = {"model": "model", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    times, last = [], ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = line
                times.append(time.perf_counter())
    made = json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]
    if made != tokens:
        raise ServerError(f"{client.base_url} made {made} tokens instead of {tokens}")
    return (times[-1] - times[0]) / max(1, tokens - 1)


def prompts_for(streams: int) -> int:
    """Several in turn on each of several streams: with one each, a run lasts as long as its slowest text, and the
    others' streams stand empty until then, on whichever server they were quicker."""
    return TURNS * streams if streams > 1 else 1


@attrs.define
class Taken(Pairs):
    """`steps` holds 1 / itl of each pair: above one is in favour of the heads."""

    prompts: itertools.cycle[str] = attrs.field(factory=lambda: itertools.cycle(ALL))


def take(servers: Sequence[Server], names: Names, streams: int, tokens: int, *, in_order: bool, into: Pairs) -> str:
    """One run on each of (without, medusa) with the same prompts, woken by a short one, the other standing still."""
    assert isinstance(into, Taken)
    prompts = list(itertools.islice(into.prompts, prompts_for(streams)))
    runs, others = {}, 0.0
    groups = {server.process.pid for server in servers}
    for server, other in itertools.permutations(servers if in_order else servers[::-1]):
        with stopped(other), watching(groups) as watch:
            asyncio.run(drive(server, prompts[:streams], WAKE_TOKENS, streams))
            runs[server.url] = asyncio.run(drive(server, prompts, tokens, streams))
        others = max(others, watch.others)
    a, b = (runs[server.url] for server in servers)
    into.others.append(others)
    into.rate.append(Pair(baseline=a.rate, candidate=b.rate, baseline_first=in_order))
    into.steps.append(Pair(baseline=1 / a.itl, candidate=1 / b.itl, baseline_first=in_order))
    return (
        f"{streams} stream(s): {names.baseline} {a.rate:7.2f}, {names.candidate} {b.rate:7.2f} tokens/s, "
        f"ratio {b.rate / a.rate:.3f}"
    )


@contextmanager
def contestants(
    options: argparse.Namespace, speculation: list[dict[str, Any]], *, stock_first: bool
) -> Iterator[Sequence[Server]]:
    """Both up and warm; what the bridge counted meanwhile is added to `speculation`."""
    args = ["--served-model-name", "model", *ARGS[options.engine].split()]
    stock = Server(build(), args, engine=options.engine, env=SAME_LUCK, timeout=600)
    ours = [*BRIDGE, "--plugin-set", f"speculative.tokens={options.draft_tokens}"]
    medusa = Server(build(), [*args, *ours, *options.set], engine=options.engine, env=SAME_LUCK, timeout=600)
    with ExitStack() as stack:
        for server in (stock, medusa) if stock_first else (medusa, stock):
            stack.enter_context(server)
        for server, streams in itertools.product((stock, medusa), options.streams):
            for _ in range(WARM):
                asyncio.run(drive(server, ALL[-prompts_for(streams) :], options.tokens, streams))
        if options.off:
            Client(medusa.url).set({"speculative.plugin": "none"})
        before = Client(medusa.url).get("status")["speculation"]
        yield stock, medusa
        after = Client(medusa.url).get("status")["speculation"]
        speculation.append({key: after[key] - before[key] for key in ("drafts", "draft_tokens", "accepted")})
        speculation[-1]["sources"] = {
            source: {key: count[key] - before["sources"].get(source, {}).get(key, 0) for key in count}
            for source, count in after["sources"].items()
        }
        speculation[-1]["accepted_at"] = [
            now - then for now, then in itertools.zip_longest(after["accepted_at"], before["accepted_at"], fillvalue=0)
        ]


def acceptance(speculation: Sequence[Mapping[str, Any]], *, off: bool) -> dict[str, Any]:
    """Of all rounds together, at all numbers of streams. A draft is one request's in one step."""
    drafts = sum(part["drafts"] for part in speculation)
    if off:
        if drafts:
            raise ServerError(f"{drafts} drafts though speculation is off")
        return {}
    if not drafts:
        raise ServerError("nothing was drafted: is the plugin tripped? see the status of the server")
    accepted = sum(part["accepted"] for part in speculation)
    positions = itertools.zip_longest(*(part["accepted_at"] for part in speculation), fillvalue=0)
    sources: dict[str, Counter[str]] = defaultdict(Counter)
    for part in speculation:
        for source, count in part["sources"].items():
            sources[source].update(count)
    return {
        "acceptance_length": 1 + accepted / drafts,
        "accepted_at": [round(sum(counts) / drafts, 4) for counts in positions],
        "drafts": drafts,
        "draft_tokens": sum(part["draft_tokens"] for part in speculation),
        "sources": {
            source: {**count, "acceptance_length": round(1 + count["accepted"] / max(1, count["drafts"]), 4)}
            for source, count in sources.items()
        },
    }


def benchmark(options: argparse.Namespace, console: Console) -> None:
    speculation: list[dict[str, Any]] = []
    taken = compare(
        lambda first: contestants(options, speculation, stock_first=first),
        NAMES,
        options,
        console,
        take=take,
        pairs=Taken,
    )
    counted = acceptance(speculation, off=options.off)
    finish(taken, NAMES, f"{options.engine}: Medusa heads against the stock engine, medians of pairs", console)
    if counted:
        console.print(f"acceptance length {counted['acceptance_length']:.3f}, accepted at {counted['accepted_at']}")
    for source, count in counted.get("sources", {}).items():
        console.print(f"  {source}: {count['drafts']} drafts, acceptance length {count['acceptance_length']:.3f}")
    metrics: dict[str, float] = {
        f"speedup_{streams}": round(pairs.summary("rate").median, 4) for streams, pairs in taken.items()
    }
    if counted:
        metrics["acceptance_length"] = round(counted["acceptance_length"], 4)
    for streams, pairs in taken.items():
        kept = summarize([1 - 1 / pair.ratio for pair in pairs.steps])
        metrics[f"itl_reduction_{streams}"] = round(kept.median, 4)
    about = {"tokens": options.tokens, "draft_tokens": options.draft_tokens, "args": ARGS[options.engine]}
    result = {
        "metrics": metrics,
        "detail": {
            "streams": detail(taken, NAMES),
            "speculation": counted,
            **about,
            "set": options.set,
            "model": "smollm2-135m",
            "prompts": "bench/heldout.py, chat completions",
        },
        "provenance": provenance(*DISTRIBUTIONS[options.engine]),
    }
    path = OUT / f"medusa-{'off-' if options.off else ''}{options.engine}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"wrote bench/out/{path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the stock engine with one that drafts with Medusa heads.")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], choices=range(1, 17))
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per stream and run")
    parser.add_argument("--draft-tokens", type=int, default=4, help="speculative.tokens")
    parser.add_argument("--off", action="store_true", help="with speculation launched, and turned off")
    parser.add_argument("--set", nargs="+", default=[], help="further words for the launch line of the bridge")
    parser.add_argument("--rounds", type=int, default=2, help="with fresh servers each; an even number is fair")
    parser.add_argument("--minutes", type=float, default=5.0, help="time for pairs, in all rounds together")
    options = parser.parse_args()
    return run(lambda console: benchmark(options, console))


if __name__ == "__main__":
    sys.exit(main())
