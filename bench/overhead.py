"""What the bridge costs: one engine with it and one without, driven in turn (`make bench-overhead ENGINE=vllm`).

`--control` puts stock against stock: what the method itself gets wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.paired import provenance
from bench.turns import Names, Pairs, add_arguments, compare, detail, drive, finish, metrics
from chunkllm_bridge.client import Client
from scripts.model import build
from scripts.serve import run
from tests.support.server import ENGINES, Server, ServerError

OUT = Path(__file__).parent / "out"
POOL_BYTES = 2**30  # of a stock server, too: ENGINES gives it to vLLM, and so many tokens of this model are SGLang's
QUOTA = 0.9  # of the pool
# Let both start from the same hashes, and have their weights in large pages.
SAME_LUCK = {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ARGS = {
    "vllm": "--dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --enforce-eager --disable-uvicorn-access-log",
    "sglang": "--dtype bfloat16 --context-length 1024 --max-running-requests 8 --max-total-tokens 46592 "
    "--log-level-http warning",
}
DISTRIBUTIONS = {engine: (engine, "torch", "transformers", "chunkllm-bridge") for engine in ENGINES}
NAMES = Names("stock", "bridge")


def bridge_args() -> list[str]:
    """The bridge with a pool of the stock size; `contestants` puts a quota in force, and status and metrics are on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ["--plugin", "chunkllm", "--plugin-set", f"kv_cache.memory_ratio={POOL_BYTES / memory:.6f}"]


@contextmanager
def contestants(options: argparse.Namespace, *, stock_first: bool) -> Iterator[Sequence[Server]]:
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


def result(taken: Mapping[int, Pairs], options: argparse.Namespace) -> dict[str, Any]:
    about = {"tokens": options.tokens, "args": ARGS[options.engine], "model": "smollm2-135m"}
    return {
        "metrics": metrics(taken),
        "detail": {"streams": detail(taken, NAMES), **about},
        "provenance": provenance(*DISTRIBUTIONS[options.engine]),
    }


def benchmark(options: argparse.Namespace, console: Console) -> None:
    taken = compare(lambda first: contestants(options, stock_first=first), NAMES, options, console)
    kind = "control" if options.control else "overhead"
    finish(taken, NAMES, f"{options.engine}, {kind}: bridge against stock, medians of pairs", console)
    path = OUT / f"{kind}-{options.engine}.json"
    path.write_text(json.dumps(result(taken, options), indent=2) + "\n")
    console.print(f"wrote bench/out/{path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a stock engine with one that has the bridge attached.")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    add_arguments(parser, rounds=4, minutes=6.0)
    parser.add_argument("--control", action="store_true", help="stock against stock")
    options = parser.parse_args()
    return run(lambda console: benchmark(options, console))


if __name__ == "__main__":
    sys.exit(main())
