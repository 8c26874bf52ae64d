"""tests/support/server.py, against programs that stand in for an engine."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from scripts.serve import serve
from tests.support import server as module
from tests.support.server import Engine, Server, ServerError, attempt

ENV = {"TOKEN": "ours"}
ANSWERS = """
import http.server, os, subprocess, sys
print("TOKEN", os.environ.get("TOKEN"), flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("CHILD", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """Makes a program the command of an engine named `pretend`."""

    def make(program: str) -> None:
        engine = Engine(argv=lambda home, model, host, port: [sys.executable, "-c", program, str(port)], env=ENV)
        monkeypatch.setitem(module.ENGINES, "pretend", engine)

    return make


def test_answers_while_the_with_lasts_and_leaves_nothing(pretend, log_file: Path):
    """Inside the `with` the server answers; after it, not even a child that ignored the end is left."""
    pretend(ANSWERS)
    with Server("m", engine="pretend", log_file=log_file) as server:
        assert server.alive
        child = int(server.log().split("CHILD ")[1].split()[0])

    assert not server.alive
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, f"the child {child} is still there"
        time.sleep(0.02)


def test_an_early_end_is_noticed_at_once(pretend, log_file: Path):
    """A server that ends before it is ready is an error at once, with its exit code and the end of its log."""
    pretend("import sys; print('no such model'); sys.exit(3)")
    server = Server("m", engine="pretend", log_file=log_file)
    started = time.monotonic()

    with pytest.raises(ServerError, match=r"exit code 3(.|\n)*no such model"), server:
        pass

    assert time.monotonic() - started < 5


def test_not_ready_in_time(pretend, log_file: Path):
    """A server that never answers is stopped when the time is up."""
    pretend("import time; time.sleep(600)")
    server = Server("m", engine="pretend", log_file=log_file, timeout=0.3)

    with pytest.raises(ServerError, match="not ready within"), server:
        pass

    assert not server.alive


@pytest.mark.parametrize(("env", "seen"), [({}, "ours"), ({"TOKEN": "mine"}, "mine"), ({"TOKEN": None}, "None")])
def test_environment_can_be_given_and_taken_away(pretend, env, seen, log_file: Path):
    """A test's variables beat the engine's, and None removes one."""
    pretend(ANSWERS)

    with Server("m", engine="pretend", env=env, log_file=log_file) as server:
        assert f"TOKEN {seen}\n" in server.log()


def test_a_launch_that_is_meant_to_fail(pretend, log_file: Path):
    """`attempt` hands over the server once it has ended by itself, for its exit code and its log."""
    pretend("import sys; print('every reason'); sys.exit(2)")

    with attempt(Server("m", engine="pretend", log_file=log_file)) as server:
        assert 2 == server.process.returncode
        assert "every reason" in server.tail()


def test_unknown_engine_is_answered_with_the_known_ones():
    """A wrong engine name is refused with the right ones."""
    with pytest.raises(ValueError, match=r"unknown engine 'vlm' \(known: .*vllm"):
        Server("m", engine="vlm")


def test_own_environment_is_not_changed(pretend, log_file: Path):
    """Making a server changes nothing in this process."""
    before = dict(os.environ)
    pretend(ANSWERS)
    Server("m", engine="pretend", log_file=log_file, env={"CHUNKLLM_TEST": "1"})

    assert before == dict(os.environ)


def test_serving_tells_how_long_the_start_took(pretend, log_file: Path):
    """`make serve` waits in sight, not before it shows anything; a server that ends by itself is an error."""
    pretend("import os, threading, time; time.sleep(1); threading.Timer(3, os._exit, [5]).start()" + ANSWERS)
    server, screen = Server("m", engine="pretend", log_file=log_file), io.StringIO()

    with pytest.raises(ServerError, match="exit code 5"):
        serve(server, Console(file=screen, width=120))

    assert re.search(r"server ready on \S+ after [1-3] s", screen.getvalue())
    assert not server.alive
