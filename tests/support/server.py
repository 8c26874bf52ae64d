"""A real engine server on a free loopback port, for as long as a `with` lasts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import httpx
from openai import AsyncOpenAI, OpenAI

HOME = Path(sys.prefix)
"""The environment that runs us; an engine's server can be started from another."""


@attrs.frozen(kw_only=True)
class Engine:
    """How one engine's server is started: its command for (environment, model, host, port), and the variables it sees.

    `exact` are the arguments of a server that answers exactly: float32, eager, 32 tokens a block. `quick` are the
    variables of one that is up soon rather than fast.
    """

    argv: Callable[[Path, str, str, int], list[str]]
    env: Mapping[str, str]
    exact: tuple[str, ...] = ()
    quick: Mapping[str, str] = attrs.field(factory=dict)


def _vllm(home: Path, model: str, host: str, port: int) -> list[str]:
    return [str(home / "bin" / "vllm"), "serve", model, "--host", host, "--port", str(port)]


def _sglang(home: Path, model: str, host: str, port: int) -> list[str]:
    place = ["--host", host, "--port", str(port), "--device", "cpu", "--enable-metrics"]
    return [str(home / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", model, *place]


ENGINES = {
    "vllm": Engine(
        argv=_vllm,
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        exact=("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"),
    ),
    "sglang": Engine(
        argv=_sglang,
        env={"HF_HUB_OFFLINE": "1"},
        # without a number of tokens the pool would be most of the machine's memory
        exact=(
            *("--dtype", "float32", "--page-size", "32", "--context-length", "1024", "--max-total-tokens", "16384"),
            *("--max-running-requests", "64", "--skip-server-warmup"),
        ),
        quick={"CHUNKLLM_CPU_COMPILE": "0"},
    ),
}


class ServerError(Exception):
    """The server died or did not become ready; the text ends with the tail of its log."""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _temporary_log(engine: str) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"chunkllm-{engine}-", suffix=".log")
    os.close(handle)
    return Path(name)


class Server:
    """`with Server(model, ["--enforce-eager"]) as server:` gives a server that answers; leaving stops it.

    `env` adds to the variables (a None takes one away). The log goes to `log_file`, or to a temporary file that stays
    behind only if something went wrong. The server has a session of its own: Ctrl-C reaches it through us.
    """

    HOST = "127.0.0.1"
    GRACE = 20.0  # seconds between SIGTERM and SIGKILL

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str] = (),
        *,
        engine: str = "vllm",
        home: Path = HOME,
        env: Mapping[str, str | None] | None = None,
        log_file: Path | None = None,
        timeout: float = 300.0,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r} (known: {', '.join(sorted(ENGINES))})")
        self.model = str(model)
        self.port = free_port(self.HOST)
        self.url = f"http://{self.HOST}:{self.port}"
        self.timeout = timeout
        self.argv = [*ENGINES[engine].argv(home, self.model, self.HOST, self.port), *args]
        merged = {**os.environ, **ENGINES[engine].env, **(env or {})}
        self.env = {key: value for key, value in merged.items() if value is not None}
        self._keep_log = log_file is not None
        self.log_file = log_file or _temporary_log(engine)
        self._process: subprocess.Popen[bytes] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; `wait` tells when it answers."""
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self.argv, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Return as soon as /health answers; a process that ends first is noticed at once. Calls `on_wait` often."""
        deadline = time.monotonic() + self.timeout
        with httpx.Client(timeout=5.0) as client:
            while time.monotonic() < deadline:
                with suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                on_wait()
                with suppress(subprocess.TimeoutExpired):
                    code = self.process.wait(timeout=0.1)
                    raise ServerError(f"the server ended with exit code {code} before it was ready\n{self.tail()}")
        raise ServerError(f"the server was not ready within {self.timeout:.0f} s\n{self.tail()}")

    def stop(self) -> int:
        """Ask it to end; what is left of its process group after the grace is killed."""
        process = self.process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # a shell in the background makes its children ignore SIGINT
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=self.GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None and not self._keep_log:
            self.log_file.unlink(missing_ok=True)

    # -- use -------------------------------------------------------------------------------------------------------

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def openai(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of the log, under its file's name."""
        return "\n".join([f"--- {self.log_file}", *self.log().splitlines()[-lines:]])


@contextmanager
def attempt(server: Server) -> Iterator[Server]:
    """For a launch that is meant to fail: waits for the process to end by itself, then hands over the server."""
    server.start()
    try:
        server.process.wait(timeout=server.timeout)
        yield server
    finally:
        server.stop()
