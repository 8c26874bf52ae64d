"""Control routes on vLLM's own HTTP server, and the way from there to every EngineCore."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import attrs
from fastapi import FastAPI

from chunkllm_bridge.common.control import Command, Reply, Set, Status, encode, merge
from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.common.passport import Passport, check_handshake
from chunkllm_bridge.common.reporter import Reporter
from chunkllm_bridge.common.routes import Routes, publish_token, tokens_for
from chunkllm_bridge.vllm.metrics import reporter_for
from chunkllm_bridge.vllm.transport import in_config

CALL = "chunkllm_control"
"""The attribute of EngineCore that takes a message and gives a reply; vLLM's utility calls find it by name."""
CORE = "EngineCore"
"""What vLLM calls the process that schedules."""
PATIENCE = 0.25
"""Seconds between two looks at whether the engine that is to answer lives."""


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
        self._routes = Routes()
        self._reporter: Reporter | None = None

    def attach_router(self, app: FastAPI) -> None:
        self._routes.attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Shake hands with EngineCore, or refuse to serve; publish the token; start reporting."""
        passport = None if engine_client is None else in_config(engine_client.vllm_config)
        if passport is None:
            return
        passport.verify("API server")
        line = Line(engine_client)
        await shake_hands(line, passport)
        keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
        tokens = tokens_for(keys, os.environ)
        if not keys:
            publish_token(args.uds or f":{args.port}", tokens[0])
        self._routes.open(line, tokens)
        self._reporter = reporter_for(engine_client, line, passport.spec)
        self._reporter.start(asyncio.get_running_loop())


async def shake_hands(line: Line, passport: Passport) -> None:
    """Every EngineCore and worker must have attached the same bridge. Raises `IncompatibleError`."""
    try:
        reply = await line.send(Status())
    except Exception as error:  # an EngineCore without the bridge has no such call; vLLM wraps what it raises
        raise IncompatibleError("the bridge in the EngineCore process", [f"it does not answer: {error}"]) from error
    check_handshake(reply.data, passport, CORE)
