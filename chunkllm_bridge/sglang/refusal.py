"""How a scheduler process refuses to start: its reasons reach the launching process, which tells the operator.

What a scheduler raises, SGLang logs with a traceback and answers by killing the whole launch (`run_scheduler_process`),
so that nobody could say why. A refusal ends the process quietly and leaves its reasons in a file of the launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from chunkllm_bridge.common.errors import BridgeError, IncompatibleError
from chunkllm_bridge.common.log import get_logger

VARIABLE = "CHUNKLLM_REFUSALS"
"""Environment variable: "PID:FILE" of the launching process and of the file for reasons."""

log = get_logger("sglang.refusal")


@contextlib.contextmanager
def collected() -> Iterator[Path]:
    """In the launching process: the file into which its children write, for as long as they start."""
    with tempfile.TemporaryDirectory(prefix="chunkllm-") as folder:
        file = Path(folder) / "refusals"
        before, os.environ[VARIABLE] = os.environ.get(VARIABLE), f"{os.getpid()}:{file}"
        try:
            yield file
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def told(file: Path) -> list[str]:
    """The reasons in it, each once."""
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return []
    return list(dict.fromkeys(json.loads(line) for line in lines))


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """In a child: a `BridgeError` from this block ends the process, and the launching one says why."""
    try:
        yield
    except BridgeError as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """End this process with the error's reasons in the launch's file, at once: neither an exception, which SGLang takes
    for a crash, nor a way out that waits for the threads of an engine that is half made."""
    text = str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}"
    reasons = [text]
    if isinstance(error, IncompatibleError):
        reasons = [f"{error.name}: {reason}" for reason in error.reasons]
    launcher, _, file = os.environ.get(VARIABLE, "").partition(":")
    if not file:
        print(f"chunkllm: {text}", file=sys.stderr)
        leave()
    log.error("bridge.refused", reason=text)
    with open(file, "a") as handle:
        handle.write("".join(f"{json.dumps(reason)}\n" for reason in reasons))
    if os.getppid() != int(launcher):  # a data-parallel controller would wait for this replica for ever
        os.kill(os.getppid(), signal.SIGKILL)
    leave()


def leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(IncompatibleError.exit_code)
