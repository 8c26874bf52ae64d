"""A completion streamed from a real server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import attrs
import httpx

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
