"""Control of a running engine: the line to every scheduler, the handshake, and our routes on SGLang's HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import zmq
from sglang.srt.managers.io_struct import sock_recv, sock_send
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.utils import TypeBasedDispatcher

from chunkllm_bridge.common.control import Command as Wanted
from chunkllm_bridge.common.control import Reply, Set, Status, encode, merge
from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.passport import KEY, Passport, check_handshake
from chunkllm_bridge.common.routes import Routes, publish_token, tokens_for
from chunkllm_bridge.sglang.transport import Answer, Command

log = get_logger("sglang.control")

ATTACHED = "chunkllm"
"""Our attribute of a tokenizer manager: what is attached behind it."""
PATIENCE = 0.25
"""Seconds between two looks at whether the processes that are to answer live."""
HANDSHAKE = 120.0
"""Seconds in which schedulers that said they are ready have to answer their first command."""


class Line:
    """The line from a tokenizer manager to the scheduler of every replica.

    SGLang's own `FanOutCommunicator` takes the late answers to a call that was given up for those to the next; this one
    knows each answer by the name of its question.
    """

    def __init__(self, manager: Any, replicas: int, children: Sequence[Any]) -> None:
        self._manager, self._replicas, self._children = manager, replicas, children
        self._numbers = itertools.count()
        self._open: dict[str, tuple[list[Answer], Callable[[], None]]] = {}
        manager._result_dispatcher += TypeBasedDispatcher([(Answer, self._take)])

    async def send(self, command: Wanted) -> Reply:
        """One command to every replica; their answers as one.

        Several replicas rehearse a change before any of them makes it, so that one refusal leaves all as they were.
        """
        if isinstance(command, Set) and self._replicas > 1:
            rehearsal = await self._call(attrs.evolve(command, rehearse=True))
            if rehearsal.error:
                return rehearsal
        return await self._call(command)

    async def _call(self, command: Wanted) -> Reply:
        """Schedulers that died never answer, and SGLang's HTTP server waits for open requests before it stops."""
        done = asyncio.Event()
        with self._question(done.set) as (name, answers):
            self._manager.auto_create_handle_loop()
            self._manager._dispatch_to_scheduler(Command(rid=name, message=encode(command)))
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), PATIENCE)
                    break
                self._check_alive()
            return merged(answers)

    def exchange(self, command: Wanted, patience: float) -> Reply:
        """The same before any event loop runs: on the sockets themselves, which asyncio takes up later."""
        outwards: zmq.Socket[bytes] = zmq.Socket.shadow(self._manager.send_to_scheduler)
        inwards: zmq.Socket[bytes] = zmq.Socket.shadow(self._manager.recv_from_detokenizer)
        until = time.monotonic() + patience
        with self._question(lambda: None) as (name, answers):
            try:  # a blocking one would wait for ever for somebody to connect
                sock_send(outwards, Command(rid=name, message=encode(command)), zmq.NOBLOCK)
            except zmq.Again:
                raise ControlError("the schedulers are gone", 503) from None
            while len(answers) < self._replicas:
                if inwards.poll(int(PATIENCE * 1000)):
                    self._manager._result_dispatcher(sock_recv(inwards))
                    continue
                self._check_alive()
                if time.monotonic() > until:
                    missing = self._replicas - len(answers)
                    raise ControlError(
                        f"no answer from {missing} of {self._replicas} schedulers in {patience:g} s", 503
                    )
            return merged(answers)

    @contextlib.contextmanager
    def _question(self, done: Callable[[], None]) -> Iterator[tuple[str, list[Answer]]]:
        name, answers = f"{ATTACHED}-{next(self._numbers)}", list[Answer]()
        self._open[name] = (answers, done)
        try:
            yield name, answers
        finally:
            del self._open[name]

    def _take(self, answer: Answer) -> None:
        """Called by the tokenizer manager's dispatcher; what nobody waits for any more is dropped."""
        if answer.rid in self._open:
            answers, done = self._open[answer.rid]
            answers.append(answer)
            if len(answers) == self._replicas:
                done()

    def _check_alive(self) -> None:
        if not all(child.is_alive() for child in self._children):
            raise ControlError("the engine ended before it answered", 503)


def merged(answers: Sequence[Answer]) -> Reply:
    return merge([Reply(**answer.reply) for answer in sorted(answers, key=lambda answer: answer.rank)])


# ---- the handshake -------------------------------------------------------------------------------------------------


@attrs.frozen
class Attached:
    """What is attached behind one tokenizer manager."""

    line: Line
    passport: Passport


def attach(manager: Any, schedulers: Any, passport: Passport) -> None:
    """Every scheduler must have attached the same bridge, and answer. Raises `IncompatibleError`.

    `schedulers` is what SGLang knows of those that it started (`SchedulerInitResult`).
    """
    if reasons := strangers(schedulers.scheduler_infos, passport):
        raise IncompatibleError("the bridge", reasons)
    children = [child for child in multiprocessing.active_children() if child.pid in schedulers.all_child_pids]
    line = Line(manager, get_parallel().num_dp_ranks, children)
    try:
        reply = line.exchange(Status(), HANDSHAKE)
    except ControlError as error:
        raise IncompatibleError("the bridge in the scheduler processes", [str(error)]) from error
    if reply.error:
        raise IncompatibleError("the bridge in the scheduler processes", [reply.error])
    check_handshake(reply.data, passport, "scheduler")
    setattr(manager, ATTACHED, Attached(line, passport))


def hang_up(manager: Any) -> None:
    """Close the sockets of a tokenizer manager that is given up. What it still wanted to say to its scheduler would
    otherwise be waited for when Python collects it, for ever."""
    for value in list(vars(manager).values()):
        if isinstance(value, zmq.Socket):
            value.close(linger=0)


def strangers(infos: Sequence[Mapping[str, Any]], passport: Passport) -> list[str]:
    """What is wrong with what the schedulers said when ready; a controller says it for all of its replicas."""
    reasons = []
    for number, info in enumerate(infos):
        reports = info.get(KEY)
        for report in reports if isinstance(reports, list) else [reports]:
            if report is None:
                why = "it runs without the bridge: was `sglang.srt.plugins: chunkllm` loaded there? See its log"
                reasons.append(f"scheduler {number}: {why}")
            elif report["fingerprint"] != passport.fingerprint:
                found = f"has fingerprint {report['fingerprint']}, where it was launched {passport.fingerprint}"
                reasons.append(f"scheduler of rank {report['rank']} {found}")
    return reasons


# ---- the HTTP server -----------------------------------------------------------------------------------------------


def wrap_serving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `_setup_and_run_http_server`, for as long as it serves. Straight through where nothing is attached."""

    @functools.wraps(original)
    def setup_and_run_http_server(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.entrypoints.http_server import app

        attached = getattr(tokenizer_manager, ATTACHED, None)
        if attached is None:
            return original(server_args, tokenizer_manager, *args, **kwargs)
        with routes_open(app, tokenizer_manager, attached):
            return original(server_args, tokenizer_manager, *args, **kwargs)

    return setup_and_run_http_server


@contextlib.contextmanager
def routes_open(app: Any, manager: Any, attached: Attached) -> Iterator[None]:
    """Our routes, and the metrics on the server's own loop."""
    from chunkllm_bridge.sglang.metrics import Meter

    serving = get_serving()
    keys = [key for key in (serving.admin_api_key or serving.api_key,) if key]
    tokens = tokens_for(keys, os.environ)
    if not keys:
        publish_token(f":{serving.port}", tokens[0])
    before = list(app.router.routes)
    routes = Routes()
    routes.attach(app)
    routes.open(attached.line, tokens)
    for route in app.router.routes:
        if route not in before:  # else an API key would stand before them where an admin key is meant
            auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)
    meter = Meter(attached.line, attached.passport.spec, app, shared=get_observability().enable_metrics)
    lifespan = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def with_meter(app: Any) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            meter.start(manager, asyncio.get_running_loop())
            yield state

    app.router.lifespan_context = with_meter
    try:
        yield
    finally:
        app.router.lifespan_context = lifespan
        app.router.routes[:] = [route for route in app.router.routes if route in before]
