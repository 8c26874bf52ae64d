"""The main job, shown: a real server with the bridge, streams, and a KV quota that is cut while they run.

`make demo` runs it inside the engine's env. It exits 0 only if every stream ended well and the quota held.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import openai
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from chunkllm_bridge.client import Client
from scripts.parity import side_by_side
from scripts.serve import MODEL, bridged, run, wait_ready
from tests.support.server import ENGINES, Server, ServerError

COMMAND = str(Path(sys.prefix) / "bin" / "chunkllm")
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a robot who learns to paint.",
    "Give me five tips for learning a new language.",
    "Describe how bread is made, step by step.",
)
MAX_TOKENS = 160
LONGEST = 64 + MAX_TOKENS  # tokens of a prompt and its answer, at most
CUT_AT = 48  # tokens that each stream has when the quota is cut


@attrs.define
class Stream:
    """One chat completion on its way."""

    prompt: str
    text: str = ""
    tokens: int = 0
    ended: str = ""  # the finish reason
    stalled_since: float = attrs.field(factory=time.monotonic)
    far_enough: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def run(self, client: openai.AsyncOpenAI) -> None:
        try:
            chunks = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": self.prompt}],
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
            )
            async for chunk in chunks:
                for choice in chunk.choices:
                    self.text += choice.delta.content or ""
                    self.tokens += bool(choice.delta.content)
                    self.ended = choice.finish_reason or ""
                self.stalled_since = time.monotonic()
                if self.tokens >= CUT_AT:
                    self.far_enough.set()
            if not self.ended:
                raise ServerError(f"the stream {self.prompt!r} broke off after {self.tokens} tokens")
        finally:
            self.far_enough.set()

    @property
    def state(self) -> str:
        if self.ended:
            return f"done ({self.ended})"
        return "waiting" if time.monotonic() - self.stalled_since > 2 else "streaming"


async def kv_status(server: Server) -> dict[str, Any]:
    """What `chunkllm status` would tell. Here and below no process is started for it: the streams do not wait."""
    status = await asyncio.to_thread(Client(server.url).get, "status")
    return {**status["kv"], **status["requests"]}


# -- the screen --------------------------------------------------------------------------------------------------------


class Screen:
    """Panels that fill on a terminal; elsewhere plain lines, each written once."""

    def __init__(self, console: Console, streams: list[Stream]) -> None:
        self.console = console
        self.streams = streams
        self.quota = ""
        self._printed = [0] * len(streams)

    def event(self, text: str) -> None:
        self.console.print(f"[bold cyan]>[/bold cyan] {text}", soft_wrap=not self.console.is_terminal)

    def __rich__(self) -> Group:
        panels = []
        for stream in self.streams:
            body = Text(stream.text.replace("\n", " ")[-3 * (self.console.width - 4) :], overflow="fold")
            style = {"waiting": "yellow", "streaming": "cyan"}.get(stream.state, "green")
            title = f"{stream.prompt}  [{style}]{stream.state}, {stream.tokens} tokens[/{style}]"
            panels.append(Panel(body, title=title, title_align="left", border_style=style, height=5))
        return Group(*panels, Text(self.quota, style="bold"))

    def lines(self, *, flush: bool = False) -> None:
        """For a pipe or a log file: each stream's new text, in lines of its own."""
        for number, stream in enumerate(self.streams):
            fresh = stream.text[self._printed[number] :].replace("\n", " ")
            cut = len(fresh) if flush or stream.ended else fresh.rfind(" ", 0, 100) if len(fresh) > 100 else 0
            if cut > 0:
                self.console.print(f"[{number + 1}] {fresh[:cut].strip()}", markup=False, soft_wrap=True)
                self._printed[number] += cut

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def refresh() -> None:
            while True:
                await asyncio.sleep(0.2)
                self.lines()

        if self.console.is_terminal:
            with Live(self, console=self.console, refresh_per_second=8):
                yield
            return
        task = asyncio.create_task(refresh())
        try:
            yield
        finally:
            task.cancel()
            self.lines(flush=True)


# -- the job -----------------------------------------------------------------------------------------------------------


async def squeeze(server: Server, streams: list[Stream], screen: Screen) -> dict[str, int]:
    """Once all streams are under way, halve what they hold; then watch until all have ended. Returns what was seen.

    One request still fits: a smaller quota would be overdrawn by the last one standing, by design.
    """
    await asyncio.gather(*(stream.far_enough.wait() for stream in streams))
    before = await kv_status(server)
    blocks = max(math.ceil(LONGEST / before["block_size"]), before["held"] // 2)
    # A share of the device's memory; half a block more, so that rounding does not take one away.
    ratio = before["memory_ratio_max"] * (blocks + 0.5) / before["total"]
    screen.event(f"{before['held']} of {before['total']} KV blocks are held by {before['running']} requests")
    screen.event(f"chunkllm set kv_cache.memory_ratio={ratio:.8f}   (about {blocks} blocks)")
    await asyncio.to_thread(Client(server.url).set, {"kv_cache.memory_ratio": round(ratio, 8)})

    highest, told = 0, False
    while True:
        kv = await kv_status(server)
        screen.quota = (
            f"KV blocks: {kv['held']} held of {kv['limit']} allowed ({kv['total']} in the pool)   requests: "
            f"{kv['running']} running, {kv['waiting']} waiting   preempted so far: {kv['preempted']}"
        )
        if not told and kv["limit"] < before["limit"] and kv["held"] <= kv["limit"]:
            told = True
            screen.event(
                f"in effect: limit {before['limit']} -> {kv['limit']} blocks, held {before['held']} -> {kv['held']}; "
                f"{kv['preempted'] - before['preempted']} preempted, to go on when there is room"
            )
        highest = max(highest, kv["held"] if told else 0)
        if all(stream.ended for stream in streams):
            break
        await asyncio.sleep(0.3)
    return {"limit": kv["limit"], "highest": highest, "preempted": kv["preempted"] - before["preempted"], "told": told}


async def show(server: Server, console: Console) -> None:
    streams = [Stream(prompt) for prompt in PROMPTS]
    screen = Screen(console, streams)
    screen.event(f"streaming {len(streams)} chat completions, up to {MAX_TOKENS} tokens each")
    async with server.async_openai() as client, screen.running(), asyncio.TaskGroup() as group:
        watcher = group.create_task(squeeze(server, streams, screen))
        for stream in streams:
            group.create_task(stream.run(client))
    seen = watcher.result()
    if not seen["told"] or seen["highest"] > seen["limit"]:
        raise ServerError(f"the smaller quota did not hold: {seen}\n{server.tail()}")
    screen.event(
        f"all {len(streams)} ended well; under the quota of {seen['limit']} blocks at most {seen['highest']} were "
        f"held, {seen['preempted']} preemptions, nothing lost"
    )


def demo(engine: str, console: Console) -> None:
    server = bridged(engine)
    console.print(f"[bold]$ {' '.join(server.argv)}[/bold]", soft_wrap=True, highlight=False)
    server.start()
    try:
        wait_ready(server, console)
        asyncio.run(show(server, console))
        subprocess.run([COMMAND, "status", "--url", server.url], check=True)  # straight to the terminal, as typed
    except (ExceptionGroup, subprocess.CalledProcessError) as error:
        raise ServerError(f"{error!r}\n{server.tail()}") from error
    finally:
        server.stop()
    console.print("server stopped")


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a server with the bridge, stream, cut the quota, stop.")
    parser.add_argument(
        "--engine", choices=[*sorted(ENGINES), "both"], default="vllm", help="both: compare their texts"
    )
    engine = parser.parse_args().engine
    return run(side_by_side if engine == "both" else lambda console: demo(engine, console))


if __name__ == "__main__":
    sys.exit(main())
