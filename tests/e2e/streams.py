"""Several completions streamed at once from a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

import attrs
import httpx

from tests.support.server import Server

Meanwhile = Callable[[list["Stream"]], Awaitable[None]]


@attrs.define
class Stream:
    prompt: str
    text: str = ""
    chunks: int = 0
    ended: str = ""  # the finish reason


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


def run_streams(
    server: Server, prompts: Sequence[str], tokens: int, meanwhile: Meanwhile | None = None
) -> list[Stream]:
    """Every stream to its end, with `meanwhile` beside them."""

    async def run() -> list[Stream]:
        streams = [Stream(prompt) for prompt in prompts]
        async with connect(server) as client:
            beside = [meanwhile(streams)] if meanwhile else []
            await asyncio.gather(*(read(client, server.model, stream, tokens) for stream in streams), *beside)
        return streams

    return asyncio.run(run())


def connect(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False)
