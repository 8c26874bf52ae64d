"""Control over HTTP: the routes on an engine's own server, and the secret that guards them."""

from __future__ import annotations

import json
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Protocol

from chunkllm_bridge.common import token
from chunkllm_bridge.common.control import Command, Config, Plugins, Reply, Set, Status
from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.log import get_logger

if TYPE_CHECKING:  # the engine's own server brings them; the bridge does not depend on them
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

log = get_logger("routes")

LONGEST = 65536
"""Bytes of the longest command."""


class Line(Protocol):
    """The way from a server to its engines. Raises `ControlError` where no answer comes."""

    async def send(self, command: Command) -> Reply: ...


class Routes:
    """Refuse every command until they are opened: a server has its routes before it has an engine."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._tokens: Sequence[str] = ()

    def open(self, line: Line, tokens: Sequence[str]) -> None:
        """Pass commands on for whoever has one of the tokens."""
        self._line, self._tokens = line, tokens

    def attach(self, app: FastAPI) -> None:
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def status(request: Request) -> JSONResponse:
            return await self._answer(request, Status())

        async def config(request: Request) -> JSONResponse:
            return await self._answer(request, Config())

        async def plugins(request: Request) -> JSONResponse:
            return await self._answer(request, Plugins())

        async def change(request: Request) -> JSONResponse:
            if refusal := self._refusal(request):  # before anything of a stranger's is read
                return refusal
            try:
                text = await body_of(request)
                if text is None:
                    return JSONResponse({"error": f"a command has {LONGEST} bytes at most"}, 413)
                body = json.loads(text)
                values = body["set"]
                if not isinstance(values, dict) or not values:
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                return JSONResponse({"error": 'send {"set": {"kv_cache.memory_ratio": 0.1, ...}}'}, 400)
            try:
                check_sendable(values)
                return await self._answer(request, Set(values=values))
            except (ValueError, OverflowError, RecursionError) as error:  # no form in which it could reach the engine
                return JSONResponse({"error": f"these values cannot be sent to the engine: {error}"}, 400)

        for path, handler, method in (
            ("status", status, "GET"),
            ("config", config, "GET"),
            ("plugins", plugins, "GET"),
            ("set", change, "POST"),
        ):
            # FastAPI would look the names up in this module, which has them for typing only
            handler.__annotations__ = {"request": Request, "return": JSONResponse}
            app.add_api_route(f"/chunkllm/{path}", handler, methods=[method], include_in_schema=False)

    def _refusal(self, request: Request) -> JSONResponse | None:
        from fastapi.responses import JSONResponse

        if self._line is None:
            return JSONResponse({"error": "the bridge is off: start the server with --plugin chunkllm"}, 503)
        if not token.admits(request.headers.get("authorization"), self._tokens):
            return JSONResponse({"error": "control needs the server's token: Authorization: Bearer ..."}, 401)
        return None

    async def _answer(self, request: Request, command: Command) -> JSONResponse:
        from fastapi.responses import JSONResponse

        if refusal := self._refusal(request):
            return refusal
        assert self._line is not None
        try:
            reply = await self._line.send(command)
        except ControlError as error:
            return JSONResponse({"error": str(error)}, error.status)
        body = {**reply.data, "error": reply.error} if reply.error else reply.data
        return JSONResponse(body, reply.status)


def check_sendable(values: object) -> None:
    """Refuse on every engine what one of them cannot send: broken text, and numbers of more than 64 bits."""
    text = json.dumps(values, ensure_ascii=False).encode()
    json.loads(text, parse_int=lambda digits: int(digits).to_bytes(8, signed=True))


async def body_of(request: Request) -> bytes | None:
    """The body of a command; None for one that is longer than any command."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST:
            return None
    return body


def tokens_for(api_keys: Iterable[str | None], environ: MutableMapping[str, str]) -> list[str]:
    """What opens control: the server's own keys, or where it has none the token of this launch."""
    return [key for key in api_keys if key] or [token.ensure(environ)]


def publish_token(address: str, secret: str) -> None:
    """Lay the token where the command finds it. Serving does not depend on that: where it cannot be, say so."""
    try:
        log.info("control.open", token_file=str(token.write(address, secret)))
    except OSError as error:
        remedy = f"give {token.VARIABLE} or --api-key to server and command, or a writable XDG_STATE_HOME"
        log.warning("control.no_token_file", reason=str(error), remedy=remedy)
