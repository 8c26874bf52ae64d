"""Completions streamed from a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import attrs
import httpx

Meanwhile = Callable[[list["Client"]], Awaitable[None]]


@attrs.define
class Stream:
    prompt: str
    text: str = ""
    chunks: int = 0
    ended: str = ""  # the finish reason


@attrs.define
class Client:
    """Asks the same again and again: there is load for as long as a test needs it, however fast the machine is and
    however late control answers on one that is busy."""

    prompt: str
    streams: list[Stream] = attrs.field(factory=list)

    @property
    def chunks(self) -> int:
        return sum(stream.chunks for stream in self.streams)

    async def ask(self, http: httpx.AsyncClient, model: str, tokens: int, enough: asyncio.Event) -> None:
        """Until it is enough; the last stream goes on to its end."""
        while not enough.is_set():
            self.streams.append(Stream(self.prompt))
            await read(http, model, self.streams[-1], tokens)


async def heard(clients: list[Client], chunks: int) -> None:
    """Return once every client has received so many."""
    while any(client.chunks < chunks for client in clients):
        await asyncio.sleep(0.01)


async def read(client: httpx.AsyncClient, model: str, stream: Stream, tokens: int) -> None:
    body = {"model": model, "prompt": stream.prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert 200 == response.status_code, await response.aread()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data in ("", "[DONE]"):
                continue
            for choice in json.loads(data)["choices"]:
                stream.text += choice["text"]
                stream.chunks += bool(choice["text"])
                stream.ended = choice["finish_reason"] or stream.ended
