"""SGLang against vLLM, both without the bridge, driven in turn on this machine (`make bench-engines ENGINE=both`).

Each is at its best: vLLM compiled, SGLang with what `chunkllm_bridge.sglang.platform` chooses. Same model, prompts,
lengths and pool; prefix caches on; every server from its own environment.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from rich.console import Console

from bench.overhead import DISTRIBUTIONS, OUT, SAME_LUCK
from bench.paired import provenance
from bench.turns import Names, add_arguments, compare, detail, drive, finish, metrics
from scripts.envs import ROOT
from scripts.model import build
from scripts.serve import run
from tests.support.server import Server, ServerError

# a pool of 1 GiB (vLLM has it by ENGINES), eight sequences of at most 1024 tokens, no line per request in the log
ARGS = {
    "vllm": "--dtype bfloat16 --max-model-len 1024 --max-num-seqs 8 --disable-uvicorn-access-log",
    "sglang": "--dtype bfloat16 --context-length 1024 --max-running-requests 8 --max-total-tokens 46592 "
    "--log-level-http warning",
}
NAMES = Names("vllm", "sglang")
WARM = 3  # runs of each kind before anything is measured: shapes are compiled as they come up


def home(engine: str) -> Path:
    return ROOT / ".envs" / engine


@contextmanager
def contestants(options: argparse.Namespace, *, vllm_first: bool) -> Iterator[Sequence[Server]]:
    """Both up and warm, started one after the other."""
    servers = [
        Server(
            build(),
            ["--served-model-name", "model", *args.split()],
            engine=engine,
            home=home(engine),
            env=SAME_LUCK,
            timeout=600,
        )
        for engine, args in ARGS.items()
    ]
    with ExitStack() as stack:
        for server in servers if vllm_first else servers[::-1]:
            stack.enter_context(server)
        for server, streams in itertools.product(servers, options.streams):
            for _ in range(WARM):
                asyncio.run(drive(server, streams, options.tokens))
            if "chunkllm_" in httpx.get(f"{server.url}/metrics").text:
                raise ServerError(f"the bridge is attached, but stock engines were to be compared\n{server.tail()}")
        yield servers


def versions(engine: str) -> dict[str, str]:
    """What is installed in the engine's own environment."""
    program = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    command = [str(home(engine) / "bin" / "python"), "-c", program, *DISTRIBUTIONS[engine]]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def benchmark(options: argparse.Namespace, console: Console) -> None:
    taken = compare(lambda first: contestants(options, vllm_first=first), NAMES, options, console)
    finish(taken, NAMES, "SGLang against vLLM, both without the bridge, medians of pairs", console)
    about = {"tokens": options.tokens, "args": ARGS, "model": "smollm2-135m", "bridge": "not attached to either"}
    result = {
        "metrics": metrics(taken),
        "detail": {"streams": detail(taken, NAMES), **about},
        "provenance": provenance() | {"versions": {engine: versions(engine) for engine in ARGS}},
    }
    path = OUT / "engines-both.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"wrote bench/out/{path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the two engines, each from its own environment.")
    add_arguments(parser, rounds=2, minutes=3.0)
    options = parser.parse_args()
    return run(lambda console: benchmark(options, console))


if __name__ == "__main__":
    sys.exit(main())
