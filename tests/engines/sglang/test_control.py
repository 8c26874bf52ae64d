"""The line to the schedulers, our routes and our metrics on an HTTP server of SGLang's, without an engine."""

from __future__ import annotations

import asyncio
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import zmq
import zmq.asyncio
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode, sock_recv, sock_send
from sglang.srt.utils.auth import add_api_key_middleware
from sglang.utils import TypeBasedDispatcher

from chunkllm_bridge.common.control import Reply, Set, Status
from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.common.passport import Passport
from chunkllm_bridge.common.profiles import this_machine
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.sglang import control
from chunkllm_bridge.sglang.control import Line
from chunkllm_bridge.sglang.metrics import Stopwatch
from chunkllm_bridge.sglang.transport import Answer, Command, Decision


class Manager:
    """A tokenizer manager whose schedulers are `serve`: what each says to a command."""

    def __init__(self, serve: Callable[[Command], list[dict[str, Any] | None]]) -> None:
        self._serve = serve
        self._result_dispatcher = TypeBasedDispatcher([])
        self.sent: list[Command] = []
        self.loops = 0
        self.rid_to_state: dict[str, Any] = {}

    def auto_create_handle_loop(self) -> None:
        self.loops += 1

    async def _handle_batch_output(self, batch: Any) -> None: ...

    def _dispatch_to_scheduler(self, command: Command) -> None:
        self.sent.append(command)
        for rank, reply in reversed(list(enumerate(self._serve(command)))):
            if reply is not None:
                asyncio.get_running_loop().call_soon(
                    self._result_dispatcher, Answer(rid=command.rid, reply=reply, rank=rank)
                )


def said(error: str = "", status: int = 200, **data: Any) -> dict[str, Any]:
    return {"data": data, "error": error, "status": status}


def passport() -> Passport:
    registry = Registry.installed()
    spec = Spec.resolve(file=None, sets=(), hardware=this_machine(), catalogue=registry)
    return Passport.issue(spec, registry)


class Child:
    def __init__(self, alive: bool = True) -> None:
        self.alive = alive

    def is_alive(self) -> bool:
        return self.alive


def send(line: Line, command: Any) -> Reply:
    return asyncio.run(line.send(command))


class TestLine:
    def test_one_scheduler(self) -> None:
        """Its answer, and the tokenizer manager's loop runs for it."""
        manager = Manager(lambda command: [said(word=command.message["command"])])

        assert Reply(data={"word": "status"}) == send(Line(manager, 1, [Child()]), Status())
        assert 1 == manager.loops

    def test_replicas_answer_as_one(self) -> None:
        """In the order of their ranks, whoever was first."""
        manager = Manager(lambda command: [said(replica=0), said(replica=1)])
        reply = send(Line(manager, 2, []), Status())

        assert [{"replica": 0}, {"replica": 1}] == reply.data["engines"]

    def test_replicas_rehearse_a_change(self) -> None:
        """One refusal leaves all as they were."""

        def serve(command: Command) -> list[dict[str, Any] | None]:
            refused = command.message["values"] == {"plugin.priority": 1}
            return [said(), said("too large", 409) if refused else said()]

        manager = Manager(serve)
        line = Line(manager, 2, [])

        assert "too large" == send(line, Set(values={"plugin.priority": 1})).error
        assert not send(line, Set(values={"plugin.priority": 2})).error
        assert [True, True, False] == [command.message["rehearse"] for command in manager.sent]

    def test_an_engine_that_ended(self) -> None:
        """Nobody waits for it; its late answer is not taken for another's."""
        manager = Manager(lambda command: [None])
        child = Child(alive=False)
        line = Line(manager, 1, [child])
        with pytest.raises(ControlError, match="ended before it answered") as stop:
            send(line, Status())

        late = Answer(rid=manager.sent[0].rid, reply=said(word="late"), rank=0)
        child.alive = True
        manager._serve = lambda command: [said(word="mine")]
        manager._result_dispatcher(late)

        assert 503 == stop.value.status
        assert {"word": "mine"} == send(line, Status()).data

    def test_several_at_once(self) -> None:
        """Each gets its own answer."""
        manager = Manager(lambda command: [said(name=command.rid)])
        line = Line(manager, 1, [])

        async def both() -> list[Reply]:
            return await asyncio.gather(line.send(Status()), line.send(Status()))

        assert 2 == len({reply.data["name"] for reply in asyncio.run(both())})


class TestExchange:
    """Before any event loop runs, on the tokenizer manager's own sockets."""

    @pytest.fixture
    def manager(self, tmp_path: Path) -> Iterator[Manager]:
        context = zmq.asyncio.Context()
        manager = Manager(lambda command: [])
        manager.send_to_scheduler = context.socket(zmq.PUSH)
        manager.send_to_scheduler.bind(f"ipc://{tmp_path}/out")
        manager.recv_from_detokenizer = context.socket(zmq.PULL)
        manager.recv_from_detokenizer.bind(f"ipc://{tmp_path}/in")
        yield manager
        context.destroy(linger=0)

    @pytest.fixture
    def scheduler(self, manager: Manager, tmp_path: Path) -> Callable[..., None]:
        def scheduler(*replies: dict[str, Any]) -> None:
            def run() -> None:
                with (
                    zmq.Context() as context,
                    context.socket(zmq.PULL) as inwards,
                    context.socket(zmq.PUSH) as outwards,
                ):
                    inwards.connect(f"ipc://{tmp_path}/out")
                    outwards.connect(f"ipc://{tmp_path}/in")
                    command = sock_recv(inwards)
                    for rank, reply in enumerate(replies):
                        sock_send(outwards, Answer(rid=command.rid, reply=reply, rank=rank))

            threading.Thread(target=run, daemon=True).start()

        return scheduler

    def test_answers(self, manager, scheduler) -> None:
        """From all replicas."""
        scheduler(said(replica=0), said(replica=1))
        time.sleep(0.5)
        reply = Line(manager, 2, []).exchange(Status(), 10)

        assert [{"replica": 0}, {"replica": 1}] == reply.data["engines"]

    def test_silence(self, manager, scheduler) -> None:
        """Ends with the number that is missing."""
        scheduler(said())
        time.sleep(0.5)  # it is connected long before it says that it is ready
        with pytest.raises(ControlError, match="no answer from 1 of 2 schedulers"):
            Line(manager, 2, []).exchange(Status(), 0.5)

    def test_schedulers_that_died(self, manager, scheduler) -> None:
        """Are not waited for, connected or not."""
        with pytest.raises(ControlError, match="gone"):
            Line(manager, 1, []).exchange(Status(), 60)
        scheduler()
        time.sleep(0.5)
        with pytest.raises(ControlError, match=r"ended|gone"):
            Line(manager, 1, [Child(alive=False)]).exchange(Status(), 60)

    @pytest.mark.parametrize(
        ("reply", "reason"),
        [(said("it is odd", 500), "it is odd"), (said(fingerprint="0123456789ab", workers=[]), "0123456789ab")],
    )
    def test_the_handshake(self, manager, scheduler, monkeypatch, reply, reason) -> None:
        """A scheduler that answers something else than it said when it was ready is not served from."""
        monkeypatch.setattr(control, "get_parallel", lambda: types.SimpleNamespace(num_dp_ranks=1))
        found = passport()
        report = {"chunkllm": {"fingerprint": found.fingerprint, "rank": 0}}
        schedulers = types.SimpleNamespace(scheduler_infos=[report], all_child_pids=[])
        scheduler(reply)
        time.sleep(0.5)

        with pytest.raises(IncompatibleError, match=reason):
            control.attach(manager, schedulers, found)
        assert not hasattr(manager, control.ATTACHED)


def test_messages_pass_as_msgpack() -> None:
    """SGLANG_USE_PICKLE_IPC=0: SGLang's decoder knows our messages."""
    for message in (
        Command(rid="1", message={"command": "set", "values": {"kv_cache.memory_ratio": 0.1}, "rehearse": False}),
        Answer(rid="1", reply=said(a=[1, None, "x"]), rank=3),
        Decision(limit=None, hold_new=True, release=["a"]),
    ):
        assert message == msgpack_decode(msgpack_encode(message))


class TestRoutes:
    @pytest.fixture
    def open_routes(self, monkeypatch, tmp_path: Path) -> Callable[..., Any]:
        """Our routes on a new app, with these keys of SGLang's."""

        def open_routes(app: FastAPI, *, api_key=None, admin_api_key=None, metrics=False) -> Any:
            serving = types.SimpleNamespace(api_key=api_key, admin_api_key=admin_api_key, port=31999)
            monkeypatch.setattr(control, "get_serving", lambda: serving)
            monkeypatch.setattr(control, "get_observability", lambda: types.SimpleNamespace(enable_metrics=metrics))
            monkeypatch.setenv("CHUNKLLM_TOKEN", "secret")
            if api_key or admin_api_key:
                add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
            manager = Manager(lambda command: [said(word=command.message["command"])])
            line = Line(manager, 1, [])
            return control.routes_open(app, manager, control.Attached(line, passport()))

        return open_routes

    @pytest.mark.parametrize(
        ("keys", "opens"),
        [
            ({}, "secret"),
            ({"api_key": "user"}, "user"),
            ({"admin_api_key": "admin"}, "admin"),
            ({"api_key": "user", "admin_api_key": "admin"}, "admin"),
        ],
    )
    def test_who_is_let_in(self, open_routes, keys, opens) -> None:
        """The admin key where there is one, else the API key, else the launch's token; never without."""
        app = FastAPI()
        with open_routes(app, **keys), TestClient(app) as client:
            for word, status in ((opens, 200), ("other", 401), ("", 401)):
                answer = client.get("/chunkllm/status", headers={"authorization": f"Bearer {word}"})
                assert status == answer.status_code, word
            sent = client.post(
                "/chunkllm/set", json={"set": {"plugin.priority": 3}}, headers={"authorization": f"Bearer {opens}"}
            )

        assert {"word": "set"} == sent.json()

    def test_the_app_is_given_back(self, open_routes) -> None:
        """Routes, metrics and lifespan go when serving ends."""
        app = FastAPI()
        before, lifespan = list(app.router.routes), app.router.lifespan_context
        with open_routes(app):
            assert {"/metrics", "/chunkllm/status"} < {route.path for route in app.router.routes}

        assert before == app.router.routes
        assert lifespan is app.router.lifespan_context

    def test_where_sglang_has_metrics(self, open_routes) -> None:
        """Its own /metrics gathers ours; a second one would hide it."""
        app = FastAPI()
        with open_routes(app, metrics=True):
            assert "/metrics" not in {route.path for route in app.router.routes}


class TestStopwatch:
    def watch(self, *outputs: tuple[float, dict[str, tuple[int, bool]]], live: set[str] | None = None) -> list[float]:
        """The latencies of batch outputs: time, and request -> its tokens so far and whether it is finished."""
        found: list[float] = []
        clock = iter([moment for moment, _ in outputs])
        manager = types.SimpleNamespace(rid_to_state=live or set())
        self.stopwatch = Stopwatch(manager, lambda latencies, engine: found.extend(latencies), lambda: next(clock))

        async def original(batch: Any) -> str:
            return "done"

        handle = self.stopwatch.wrap(original)
        for _, requests in outputs:
            batch = types.SimpleNamespace(
                rids=list(requests),
                completion_tokens=[count for count, _ in requests.values()],
                finished_reasons=[{"type": "stop"} if end else None for _, end in requests.values()],
            )
            assert "done" == asyncio.run(handle(batch))
        return found

    def test_token_by_token(self) -> None:
        """From one output to the next; the first token has none, and a finished request leaves nothing behind."""
        outputs = [(0, {"a": (1, False)}), (1, {"a": (2, False), "b": (1, False)}), (3, {"a": (3, True)})]

        assert [1, 2] == self.watch(*outputs)
        assert {"b"} == set(self.stopwatch._last)

    def test_several_tokens_in_one_output(self) -> None:
        """Each counts, with its share of the time; an output without a token does not."""
        assert [0.5] * 4 == self.watch((0, {"a": (1, False)}), (1, {"a": (1, False)}), (2, {"a": (5, False)}))

    def test_replicas(self) -> None:
        """Each counts as an engine of its own."""
        found: list[str] = []
        stopwatch = Stopwatch(types.SimpleNamespace(rid_to_state={}), lambda latencies, engine: found.append(engine))
        for ranks in (None, [0], [1]):
            for count in (1, 2):
                rids, ends = [str(ranks)], [None]
                batch = types.SimpleNamespace(
                    rids=rids, completion_tokens=[count], finished_reasons=ends, dp_ranks=ranks, time_stats=None
                )
                stopwatch.note(float(count), batch)

        assert ["0", "0", "1"] == found

    def test_short_answers_in_one_output(self) -> None:
        """The scheduler says when the first token was made, where it says anything."""
        found: list[float] = []
        stopwatch = Stopwatch(types.SimpleNamespace(rid_to_state={}), lambda latencies, engine: found.extend(latencies))
        stamps = [types.SimpleNamespace(prefill_finished_time=1.0), types.SimpleNamespace(prefill_finished_time=0.0)]
        ends = [{"type": "length"}] * 2
        batch = types.SimpleNamespace(
            rids=["a", "b"], completion_tokens=[3, 3], finished_reasons=ends, dp_ranks=None, time_stats=stamps
        )
        stopwatch.note(2.0, batch)

        assert [0.5, 0.5] == found

    def test_aborted_requests(self) -> None:
        """Do not pile up."""
        many = [(0, {str(number): (1, False) for number in range(5000)}), (1, {"x": (1, False)})]
        self.watch(*many, live={"x"})

        assert {"x"} == set(self.stopwatch._last)

    def test_other_outputs(self) -> None:
        """Embeddings have no tokens, and a batch of another form costs no request."""
        handle = Stopwatch(types.SimpleNamespace(rid_to_state={}), lambda *args: None).wrap(lambda batch: self.done())

        for batch in (types.SimpleNamespace(rids=["a"]), types.SimpleNamespace(rids=3, completion_tokens=[1])):
            assert "done" == asyncio.run(handle(batch))

    async def done(self) -> str:
        return "done"
