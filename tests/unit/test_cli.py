"""The `chunkllm` command and its way to a server, against a server that says what a test tells it to."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkllm_bridge import DraftsPlan, DraftsStep, Plugin, PluginSpec, Seam, cli, client
from chunkllm_bridge.common import token
from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.testing import FakeEngine, attach

SAYS = {"changed": {"plugin.priority": {"before": "[red]1", "after": "[/x]"}}, "generation": 2}


class Handler(http.server.BaseHTTPRequestHandler):
    says: tuple[int, bytes] = (200, b"")
    asked: list[dict[str, Any]]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append({"auth": self.headers.get("Authorization"), "body": body})
        self.send_response(self.says[0])
        self.end_headers()
        self.wfile.write(self.says[1])

    do_GET = do_POST = answer

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(token.VARIABLE, raising=False)
    monkeypatch.setattr(Handler, "asked", [], raising=False)
    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def url(server: http.server.HTTPServer, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.server_port}"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command with these words: exit code, and what it printed."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["chunkllm", *words])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.mark.parametrize(
    "words",
    [
        ("status", "--url", "http://[::1"),
        ("status", "--url", "http://127.0.0.1:99999"),
        ("status", "--url", "http://"),
        ("status", "--url", "unix:"),
        ("status", "--url", "localhost:8000"),
        ("set", "kv_cache.memory_ratio=nan"),
        ("set", "plugins.a.day=2024-01-01"),
        ("set", "a=1", "a=2"),
        ("status", "--no-such-option"),
    ],
)
def test_a_mistake_is_told_and_never_a_traceback(run: Any, words: tuple[str, ...]) -> None:
    """In words, or as JSON for a program."""
    code, said = run(*words)
    again, answer = run(*words, "--json")

    assert code == again != 0
    assert "Traceback" not in said
    assert json.loads(answer)["ok"] is False


@pytest.mark.parametrize("body", [b"[1]", b"5", b"null", b"<html>"])
@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_server_that_is_none_of_ours(server: http.server.HTTPServer, run: Any, status: int, body: bytes) -> None:
    """Whatever it answers."""
    Handler.says = (status, body)
    code, said = run("status", "--url", url(server))

    assert 1 == code
    assert "control routes" in said or "nothing of ours" in said


def test_vllm_s_own_not_found_is_no_answer_of_ours(server: http.server.HTTPServer, run: Any) -> None:
    """A server without the bridge is told from one that refuses."""
    Handler.says = (404, json.dumps({"error": {"message": "Not Found", "code": 404}}).encode())

    assert "has no control routes" in run("status", "--url", url(server))[1]


def test_an_error_of_the_engine_s_server_is_told_in_its_words(server: http.server.HTTPServer, run: Any) -> None:
    Handler.says = (500, json.dumps({"error": {"message": "EngineCore is gone", "code": 500}}).encode())
    code, said = run("status", "--url", url(server))

    assert (1, "chunkllm: EngineCore is gone") == (code, said.strip())


def test_brackets_are_text(server: http.server.HTTPServer, run: Any) -> None:
    """A path or a plugin's last words may hold what the table's library takes for markup."""
    kv = {"limit": 1, "total": 2, "held": 0}
    Handler.says = (200, json.dumps({**SAYS, "kv": kv}).encode())
    code, said = run("set", "plugin.priority=1", "--url", url(server))
    shown = run("config", "show", "--set", "rollback.config=/tmp/[/x]")

    assert (0, True) == (code, "plugin.priority: [red]1 -> [/x]" in said)
    assert (0, True) == (shown[0], "/tmp/[/x]" in shown[1])


class TestToken:
    def test_it_is_found_for_a_server_here(self, server: http.server.HTTPServer) -> None:
        """By the port, under any name of this machine."""
        token.write(f":{server.server_port}", "secret")
        Handler.says = (200, b"{}")
        for host in ("127.0.0.1", "localhost"):
            client.Client(url(server, host)).get("status")

        assert ["Bearer secret"] * 2 == [asked["auth"] for asked in Handler.asked]

    @pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
    def test_another_machine_s_server_is_not_told_ours(self, server: http.server.HTTPServer, host: str) -> None:
        """The same port there is another server's."""
        token.write(f":{server.server_port}", "secret")

        assert client._read(url(server, host)) is None
        assert "secret" == client._read(url(server))

    def test_one_that_is_no_ascii_is_sent_and_refused(self, server: http.server.HTTPServer) -> None:
        Handler.says = (401, b"{}")

        with pytest.raises(ControlError, match="not this server's"):
            client.Client(url(server), "tökén").get("status")

    def test_a_socket_s_is_found_from_any_folder(self, server: Any, tmp_path: Path, monkeypatch: Any) -> None:
        """A server with `--uds ./sock` and a command with the whole path mean one file."""
        monkeypatch.chdir(tmp_path)
        token.write("sock", "secret")

        assert "secret" == client._read(f"unix:{tmp_path}/sock") == client._read("unix:sock")

    def test_a_user_without_a_home(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A made-up user of a container: there is no file, and that is all."""

        def nowhere(path: Path) -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(Path, "expanduser", nowhere)

        assert client._read(url(server)) is None
        with pytest.raises(OSError, match="XDG_STATE_HOME"):
            token.write(":8000", "secret")


class Echo(Plugin):
    spec = PluginSpec(name="echo", version="1", abi=(1, 1), seams={Seam.DRAFTS})

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan:
        return DraftsPlan(tokens=step.last_tokens[:, None])


@pytest.mark.parametrize("aside", ["", "never right"])
def test_status_shows_how_drafts_fare(server: http.server.HTTPServer, run: Any, aside: str) -> None:
    """What is drafted now and what came of it; where the draft source stepped aside, why."""
    bridge = attach(FakeEngine(), {"speculative.plugin": "echo"}, Echo)
    status = bridge.status()
    status["kv"] |= {"block_size": 4, "memory_ratio": 1.0, "memory_ratio_max": 1.0}
    drafts = {"width": 3, "drafts": 200, "draft_tokens": 600, "accepted": 150, "accepted_at": [100, 50]}
    status["speculation"] |= drafts | {"stepped_aside": aside, "acceptance_length": 1.75}
    Handler.says = (200, json.dumps(status).encode())
    code, said = run("status", "--url", url(server))

    assert 0 == code
    assert all(word in said for word in ("Speculation by echo", "50% 25%", "1.75", "200", "600", "150"))
    assert (", which stepped aside: never right" in said) == bool(aside)
