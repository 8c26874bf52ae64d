"""Real servers with the bridge, the same tests on every engine: what differs between engines stands in `HOUSES`."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from chunkllm_bridge.common.profiles import this_machine
from scripts.envs import cache_root, exclusive
from tests.e2e.streams import Client, Meanwhile, Stream, read
from tests.support.server import ENGINES, HOME, Server
from tests.support.tiny import TinyLlama, make_tiny

TINY = TinyLlama()
DEEP = TinyLlama(layers=24, hidden=128)
"""As small, but slow enough (some 20 ms a step) that HTTP server and client keep up with the engine: with the 4 ms of
the other, chunks and answers came up to 3 s late on two busy cores, where the engine had sent them within 0.05 s."""

PATIENCE = 240.0
"""Seconds after which something that happens beside streams is taken for one that never will."""

FRESH = httpx.Limits(max_keepalive_connections=0)
"""A connection for each request: the servers hang up on one that was idle for 5 s, and on a busy machine they take one
for idle whose next request they have not read yet."""


@attrs.frozen(kw_only=True)
class House:
    """How a server of one engine is asked for what the tests need."""

    args: tuple[str, ...]  # as in `Engine.exact`
    env: Mapping[str, str]
    other: tuple[str, ...]  # the other way in, up to the model
    ranks: str  # the option that asks for so many ranks
    bind: str  # the variable that gives each rank its cores
    block: int = 32  # tokens in a KV block, as `args` say

    def ratio(self, blocks: int, shape: TinyLlama = TINY) -> str:
        """A `kv_cache.memory_ratio` that makes a pool of so many blocks for requests, on this machine."""
        block_bytes = self.block * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
        return f"{(blocks + 1.5) * block_bytes / this_machine().memory_bytes:.12f}"


HOUSES = {
    "vllm": House(
        args=ENGINES["vllm"].exact,
        env={"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        other=(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"),
        ranks="-tp",
        bind="VLLM_CPU_OMP_THREADS_BIND",
    ),
    "sglang": House(
        args=ENGINES["sglang"].exact,
        env={"OMP_NUM_THREADS": "1", **ENGINES["sglang"].quick},
        other=(str(HOME / "bin" / "sglang"), "serve", "--model-path"),
        ranks="--tp-size",
        bind="SGLANG_CPU_OMP_THREADS_BIND",
    ),
}


@pytest.fixture(scope="session", params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    """Every engine that this environment has."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed here")
    return str(request.param)


@pytest.fixture(scope="session")
def house(engine: str) -> House:
    return HOUSES[engine]


@pytest.fixture(scope="session")
def deep_model() -> Path:
    root = cache_root() / "tiny"
    with exclusive(root / ".lock"):
        return make_tiny(root, DEEP)


@pytest.fixture(scope="session")
def serve(engine: str, house: House, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`with serve("--plugin", "chunkllm") as running:` a server of the tiny model, with a state folder of its own.

    `key` is the control token where it is not in the file; `other` starts it by the engine's other command.
    """

    @contextmanager
    def serve(
        *args: str, model: Path = tiny_model, key: str | None = None, other: bool = False, **options: Any
    ) -> Iterator[Running]:
        folder = tmp_path_factory.mktemp("server")
        env = {**house.env, "XDG_STATE_HOME": str(folder / "state"), "CHUNKLLM_TOKEN": None, **options.pop("env", {})}
        server = Server(model, [*house.args, *args], engine=engine, env=env, log_file=folder / "server.log", **options)
        if other:
            server.argv[: server.argv.index(str(model))] = house.other
        with server:
            yield Running(server, folder / "state", key)

    return serve


class Running:
    """A server, and every way to speak to it."""

    def __init__(self, server: Server, state: Path, key: str | None = None) -> None:
        self.server, self.state = server, state
        self.http = httpx.Client(base_url=server.url, timeout=60, trust_env=False, limits=FRESH)
        self._key = key

    @property
    def token_file(self) -> Path:
        return self.state / "chunkllm" / f"control-{self.server.port}.token"

    @property
    def key(self) -> str:
        return self._key or self.token_file.read_text()

    def control(self, path: str, body: object = None, key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return self.http.request("GET" if body is None else "POST", f"/chunkllm/{path}", headers=headers, json=body)

    def status(self) -> dict[str, Any]:
        response = self.control("status")
        assert 200 == response.status_code, response.text
        return dict(response.json())

    def set(self, **values: Any) -> dict[str, Any]:
        """`__` stands for the dot."""
        response = self.control("set", {"set": {key.replace("__", "."): value for key, value in values.items()}})
        assert 200 == response.status_code, response.text
        return dict(response.json())

    @cached_property
    def _block_share(self) -> float:
        """The `kv_cache.memory_ratio` of one block; asked once, so that a quota takes one command."""
        kv = self.status()["kv"]
        return float(kv["memory_ratio_max"] / (kv["total"] + 1))

    def quota(self, blocks: int) -> dict[str, Any]:
        share = (blocks + 0.5) * self._block_share
        reply = self.set(kv_cache__memory_ratio=share)
        assert blocks == reply["kv"]["limit"]
        return reply

    def complete(self, prompt: str, tokens: int) -> str:
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        response = self.http.post("/v1/completions", json=body, headers=self.headers)
        assert 200 == response.status_code, response.text
        return str(response.json()["choices"][0]["text"])

    def streams(self, prompts: Sequence[str], tokens: int) -> list[Stream]:
        """Every stream to its end."""

        async def run() -> list[Stream]:
            streams = [Stream(prompt) for prompt in prompts]
            async with self.connect() as http:
                await asyncio.gather(*(read(http, self.server.model, stream, tokens) for stream in streams))
            return streams

        return asyncio.run(run())

    def under_load(self, prompts: Sequence[str], tokens: int, meanwhile: Meanwhile) -> list[Stream]:
        """`meanwhile`, while clients stream for as long as it takes; then all that they streamed, each to its end."""

        async def run() -> list[Stream]:
            clients, enough = [Client(prompt) for prompt in prompts], asyncio.Event()
            async with self.connect() as http, asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(client.ask(http, self.server.model, tokens, enough))
                async with asyncio.timeout(PATIENCE):
                    await meanwhile(clients)
                enough.set()
            return [stream for client in clients for stream in client.streams]

        return asyncio.run(run())

    def connect(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.server.url, headers=self.headers, timeout=300, trust_env=False, limits=FRESH
        )

    @property
    def headers(self) -> dict[str, str]:
        """What a client of the model sends: nothing, but where there is an API key."""
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    def chunkllm(self, *words: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
        """The command line, in a process of its own."""
        env = {**self.server.env, "CHUNKLLM_TOKEN": token or self._key or ""}
        command = [str(Path(sys.prefix) / "bin" / "chunkllm"), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    def json(self, *words: str) -> dict[str, Any]:
        done = self.chunkllm(*words, "--url", self.server.url, "--json")
        assert 0 == done.returncode, done.stderr
        return dict(json.loads(done.stdout))

    def metrics(self) -> dict[str, float]:
        """Every sample on /metrics, under its name with labels."""
        text = self.http.get("/metrics").text
        return {
            name: float(value)
            for name, value in re.findall(r"^([a-zA-Z_:][^\s{]*(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        }

    def ours(self, name: str, **labels: str) -> float:
        """The sum of our samples of that name with those labels."""
        return sum(
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == f"chunkllm_{name}" and all(f'{k}="{v}"' in key for k, v in labels.items())
        )

    def wait_for_metric(self, wanted: float, name: str, **labels: str) -> None:
        """The engine's counters are read once a second."""
        eventually(lambda: wanted == self.ours(name, **labels), lambda: f"{name} is {self.ours(name, **labels)}")

    def wait_idle(self) -> dict[str, Any]:
        """The status once nothing runs, waits or is held."""

        def idle() -> bool:
            status = self.status()
            return 0 == status["kv"]["held"] + status["requests"]["running"] + status["requests"]["waiting"]

        eventually(idle, lambda: str(self.status()))
        return self.status()


def eventually(true: Callable[[], bool], otherwise: Callable[[], str], timeout: float = 30) -> None:
    """Ask until it is true; the deadline is for a machine that is busy with other things."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


def plugin(status: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in status["plugins"] if row["name"] == name)
