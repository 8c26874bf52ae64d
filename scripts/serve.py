"""Serve the embedded model with the bridge until Ctrl-C: `make serve`. Also the launch that `make demo` uses."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from rich.console import Console

from scripts.envs import ROOT
from scripts.model import build
from tests.support.server import ENGINES, Server, ServerError

SPEC = ROOT / "examples" / "chunkllm.toml"
# Small enough for a laptop: 4 % of its memory for the KV cache. The launch line beats the file, which says more.
SETS = ("kv_cache.memory_ratio=0.04",)
SIZES = {
    "vllm": "--dtype bfloat16 --max-model-len 2048 --max-num-seqs 8 --block-size 32 --enforce-eager",
    "sglang": "--dtype bfloat16 --context-length 2048 --max-running-requests 8 --page-size 32",
}
MODEL = "smollm2"
# An INFO line of an engine or a bar of a loader, without the process, time and place it starts with.
TELLING = re.compile(
    r"((\(.*?pid=\d+\) )?INFO \S+ \S+ \[\S+\] |"  # vLLM
    r"\[\d{4}-\d\d-\d\d [\d:]+[^]]*\] |"  # SGLang
    r"(?=[-\w ]*[Ll]oading .*%))\s*(?P<text>\S.*)"
)
DULL = ("Route:", "Available routes", "INFO:", "server_args=", "Ignore import error", "Fail to set", "event=")


def bridged(engine: str, *extra: str) -> Server:
    """A server of the embedded model with the bridge attached, not started yet."""
    plugin = ["--plugin", "chunkllm", "--plugin-config", str(SPEC)]
    plugin += [word for value in SETS for word in ("--plugin-set", value)]
    sizes = ["--served-model-name", MODEL, *SIZES[engine].split()]
    return Server(build(), [*plugin, *sizes, *extra], engine=engine, env=ENGINES[engine].quick)


def shown(line: str) -> str | None:
    """What of a log line tells a person how far the load is; None if nothing does."""
    found = TELLING.match(line.strip())
    if found is None or found["text"].startswith(DULL):
        return None
    return found["text"]


def wait_ready(server: Server, console: Console) -> None:
    """Wait for the server, showing what it is at: a live line on a terminal, else a line every few seconds."""
    started = time.monotonic()
    last_print = 0.0
    said = ""

    def progress() -> None:
        nonlocal last_print, said
        seconds = time.monotonic() - started
        lines = server.log().splitlines()
        text = next((text for line in reversed(lines) if (text := shown(line))), "importing the engine")
        text = text if len(text) <= 90 else text[:89] + "…"
        spinner.update(f"[bold]starting the server[/bold] {seconds:3.0f} s  [dim]{text}[/dim]")
        if not console.is_terminal and text != said and seconds - last_print > 4:
            console.print(f"  {seconds:3.0f} s  {text}", markup=False, soft_wrap=True)
            last_print, said = seconds, text

    with console.status("[bold]starting the server[/bold]") as spinner:
        server.wait(progress)
    console.print(f"server ready on {server.url} after {time.monotonic() - started:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve the embedded model with the bridge until Ctrl-C.")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    options, extra = parser.parse_known_args()
    return run(lambda console: serve(bridged(options.engine, *extra), console))


def serve(server: Server, console: Console) -> None:
    server.start()
    with ExitStack() as stack:
        stack.push(server)  # stopped as by `with server`, which would wait without showing anything
        wait_ready(server, console)
        console.print(
            f"""
  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
  {sys.prefix}/bin/chunkllm status --url {server.url}
  {sys.prefix}/bin/chunkllm set kv_cache.memory_ratio=0.01 --url {server.url}
  curl -s {server.url}/metrics | grep chunkllm_
  log: {server.log_file}

Ctrl-C stops it.""",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        try:
            code = server.process.wait()
        except KeyboardInterrupt:
            console.print("stopping")
            return
        raise ServerError(f"the server ended by itself with exit code {code}\n{server.tail()}")


def run(job: Callable[[Console], None]) -> int:
    """Do the job; a failure is told and gives exit code 1. SIGTERM ends it as Ctrl-C does: no server is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        job(console)
    except ServerError as error:
        console.print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
