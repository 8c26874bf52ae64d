"""Control over HTTP: who is let in, what is a command, and how an engine's answer looks outside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkllm_bridge.common import token
from chunkllm_bridge.common.control import Command, Config, Plugins, Reply, Set, Status, encode
from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.routes import LONGEST, Routes, publish_token, tokens_for

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient


class Engine:
    """A line with an engine at its end that answers what it is told to."""

    def __init__(self, does: Callable[[Command], Reply]) -> None:
        self.does = does
        self.heard: list[Command] = []

    async def send(self, command: Command) -> Reply:
        self.heard.append(command)
        return self.does(command)


def well(command: Command) -> Reply:
    return Reply(data=encode(command))


def server(engine: Engine | None, bearer: str = "secret") -> TestClient:
    """Opened for the tokens "secret" and "other" where there is an engine, and a client with that token."""
    routes, app = Routes(), FastAPI()
    routes.attach(app)
    if engine is not None:
        routes.open(engine, ["secret", "other"])
    return TestClient(app, headers={"Authorization": f"Bearer {bearer}"})


class TestCommands:
    @pytest.mark.parametrize(
        ("path", "command"), [("status", Status()), ("config", Config()), ("plugins", Plugins())], ids=str
    )
    def test_what_is_asked_reaches_the_engine(self, path: str, command: Command) -> None:
        """And its answer comes back as it is."""
        engine = Engine(well)
        reply = server(engine, "other").get(f"/chunkllm/{path}")

        assert ([command], 200, encode(command)) == (engine.heard, reply.status_code, reply.json())

    def test_a_change(self) -> None:
        engine = Engine(well)
        reply = server(engine).post("/chunkllm/set", json={"set": {"plugin.priority": 7}})

        assert ([Set({"plugin.priority": 7})], 200) == (engine.heard, reply.status_code)

    def test_a_refusal_has_its_status_and_what_belongs_to_it(self) -> None:
        """As the engine gave it."""
        engine = Engine(lambda _: Reply(error="no", status=422, data={"problems": ["a"]}))
        reply = server(engine).get("/chunkllm/status")

        assert (422, {"problems": ["a"], "error": "no"}) == (reply.status_code, reply.json())

    def test_an_engine_that_gives_no_answer(self) -> None:
        def end(command: Command) -> Reply:
            raise ControlError("the engine ended before it answered", 503)

        reply = server(Engine(end)).get("/chunkllm/status")

        assert (503, {"error": "the engine ended before it answered"}) == (reply.status_code, reply.json())

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"[" * 50_000, 400),
            (b'{"set": ' + b'{"a": ' * 20_000, 413),
            (b'{"set": {"' + b"a" * LONGEST + b'": 1}}', 413),
            (b'{"set": []}', 400),
            (b'{"set": {}}', 400),
            (b"[]", 400),
            (b"\xff", 400),
            (b"", 400),
        ],
    )
    def test_a_body_that_is_no_command(self, body: bytes, status: int) -> None:
        """Too deep, too long or of another shape: told, and the engine hears nothing of it."""
        engine = Engine(well)
        reply = server(engine).post("/chunkllm/set", content=body)

        assert (status, []) == (reply.status_code, engine.heard)
        assert reply.json()["error"]

    @pytest.mark.parametrize(("value", "reason"), [(2**70, "int too big to convert"), (1, "too large")])
    def test_values_that_have_no_form_on_the_way(self, value: int, reason: str) -> None:
        """Told, and no error of the server's: what one engine cannot send is refused on each, and so is what the
        line itself refuses."""

        def pack(command: Command) -> Reply:
            raise OverflowError("too large")

        reply = server(Engine(pack)).post("/chunkllm/set", json={"set": {"a": value}})

        assert (400, {"error": f"these values cannot be sent to the engine: {reason}"}) == (
            reply.status_code,
            reply.json(),
        )


class TestDoors:
    def test_before_they_are_opened(self) -> None:
        """A server without the bridge, or whose engine is not there yet, says so; whoever asks."""
        for bearer in ("secret", "no"):
            client = server(None, bearer)
            for reply in (client.get("/chunkllm/status"), client.post("/chunkllm/set", content=b"[")):
                assert 503 == reply.status_code
                assert {"error": "the bridge is off: start the server with --plugin chunkllm"} == reply.json()

    def test_nothing_of_strangers_is_read(self) -> None:
        """Whoever has no token is refused before a byte of the body is parsed."""
        engine = Engine(well)
        for body in (b"[" * 100_000, b"x" * 200_000, b'{"set": {"a": 1}}'):
            assert 401 == server(engine, "no").post("/chunkllm/set", content=body).status_code
        for path in ("status", "config", "plugins"):
            assert 401 == server(engine, "no").get(f"/chunkllm/{path}").status_code
        assert [] == engine.heard

    def test_they_are_not_in_the_servers_own_manual(self) -> None:
        """Nor do they answer to other methods."""
        client = server(Engine(well))

        assert {} == client.get("/openapi.json").json()["paths"]
        assert (405, 405) == (client.post("/chunkllm/status").status_code, client.get("/chunkllm/set").status_code)


class TestTokens:
    def test_the_servers_own_keys_open_control(self) -> None:
        """Then no token is made; an empty key is none."""
        environ: dict[str, str] = {}

        assert ["a", "b"] == tokens_for(["a", None, "", "b"], environ)
        assert {} == environ

    def test_without_keys_the_launch_has_a_token(self) -> None:
        """One, which its children inherit."""
        environ: dict[str, Any] = {}

        assert tokens_for([None, ""], environ) == tokens_for([], environ) == [environ[token.VARIABLE]]

    def test_it_is_laid_where_the_command_looks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        publish_token(":8000", "secret")

        assert "secret" == token.path_for_url("http://localhost:8000").read_text()

    def test_one_that_cannot_be_written_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A closed state folder costs the file, not the server, which has loaded its model by then."""
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        with caplog.at_level(logging.WARNING, "chunkllm"):
            publish_token(":8000", "secret")

        assert "CHUNKLLM_TOKEN" in caplog.text
        assert "secret" not in caplog.text
