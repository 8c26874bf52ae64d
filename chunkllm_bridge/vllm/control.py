"""Control routes on vLLM's own HTTP server, and the way from there to every EngineCore."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

import attrs
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from chunkllm_bridge.common import token
from chunkllm_bridge.common.control import Command, Config, Plugins, Reply, Set, Status, encode, merge
from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.passport import Passport, check_handshake
from chunkllm_bridge.vllm.metrics import Reporter
from chunkllm_bridge.vllm.transport import in_config

log = get_logger("vllm.control")

CALL = "chunkllm_control"
"""The attribute of EngineCore that takes a message and gives a reply; vLLM's utility calls find it by name."""
CORE = "EngineCore"
"""What vLLM calls the process that schedules."""
PATIENCE = 0.25
"""Seconds between two looks at whether the engine that is to answer lives."""
LONGEST = 65536
"""Bytes of the longest command."""


class Line:
    """The line from an API server to its EngineCores."""

    def __init__(self, engine_client: Any) -> None:
        self._core = engine_client.engine_core

    async def send(self, command: Command) -> Reply:
        """One command to every EngineCore that this server feeds; their answers as one.

        Several engines rehearse a change before any of them makes it, so that one refusal leaves all as they were.
        """
        if isinstance(command, Set) and len(self._core.core_engines) > 1:
            rehearsal = await self._call(attrs.evolve(command, rehearse=True))
            if rehearsal.error:
                return rehearsal
        return await self._call(command)

    async def _call(self, command: Command) -> Reply:
        """vLLM forgets the calls that are under way when its engine ends, and its HTTP server waits for their answers
        before it stops: so give up when the engine does."""
        call = asyncio.ensure_future(self._core.call_utility_all_async(CALL, encode(command)))
        try:
            while not (await asyncio.wait({call}, timeout=PATIENCE))[0]:
                if self._core.resources.engine_dead:
                    raise ControlError("the engine ended before it answered", 503)
            return merge([Reply(**reply) for reply in call.result()])
        finally:
            call.cancel()


class ControlEndpoint:
    """vLLM's endpoint plugin. Does nothing where the server was started without the bridge."""

    name = "chunkllm"
    required_tasks = None

    def __init__(self) -> None:
        self._line: Line | None = None
        self._tokens: Sequence[str] = ()
        self._reporter: Reporter | None = None

    def attach_router(self, app: FastAPI) -> None:
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
                return await self._answer(request, Set(values=values))
            except (ValueError, OverflowError, RecursionError) as error:  # no form in which it could reach the engine
                return JSONResponse({"error": f"these values cannot be sent to the engine: {error}"}, 400)

        for path, handler, method in (
            ("status", status, "GET"),
            ("config", config, "GET"),
            ("plugins", plugins, "GET"),
            ("set", change, "POST"),
        ):
            app.add_api_route(f"/chunkllm/{path}", handler, methods=[method], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Shake hands with EngineCore, or refuse to serve; publish the token; start reporting."""
        passport = None if engine_client is None else in_config(engine_client.vllm_config)
        if passport is None:
            return
        passport.verify("API server")
        line = Line(engine_client)
        await shake_hands(line, passport)
        keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
        self._tokens = keys or [token.ensure(os.environ)]
        if not keys:
            publish_token(args.uds or f":{args.port}", self._tokens[0])
        self._line = line
        self._reporter = Reporter(engine_client, line, passport.spec)
        self._reporter.start(asyncio.get_running_loop())

    def _refusal(self, request: Request) -> JSONResponse | None:
        if self._line is None:
            return JSONResponse({"error": "the bridge is off: start the server with --plugin chunkllm"}, 503)
        if not token.admits(request.headers.get("authorization"), self._tokens):
            return JSONResponse({"error": "control needs the server's token: Authorization: Bearer ..."}, 401)
        return None

    async def _answer(self, request: Request, command: Command) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        assert self._line is not None
        try:
            reply = await self._line.send(command)
        except ControlError as error:
            return JSONResponse({"error": str(error)}, error.status)
        body = {**reply.data, "error": reply.error} if reply.error else reply.data
        return JSONResponse(body, reply.status)


async def body_of(request: Request) -> bytes | None:
    """The body of a command; None for one that is longer than any command."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST:
            return None
    return body


def publish_token(address: str, secret: str) -> None:
    """Lay the token where the command finds it. Serving does not depend on that: where it cannot be, say so."""
    try:
        log.info("control.open", token_file=str(token.write(address, secret)))
    except OSError as error:
        remedy = f"give {token.VARIABLE} or --api-key to server and command, or a writable XDG_STATE_HOME"
        log.warning("control.no_token_file", reason=str(error), remedy=remedy)


async def shake_hands(line: Line, passport: Passport) -> None:
    """Every EngineCore and worker must have attached the same bridge. Raises `IncompatibleError`."""
    try:
        reply = await line.send(Status())
    except Exception as error:  # an EngineCore without the bridge has no such call; vLLM wraps what it raises
        raise IncompatibleError("the bridge in the EngineCore process", [f"it does not answer: {error}"]) from error
    check_handshake(reply.data, passport, CORE)
