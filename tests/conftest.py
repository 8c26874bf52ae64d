"""What every test may ask for: models, and servers that are stopped whatever happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.envs import cache_root, exclusive
from scripts.model import build
from tests.support.server import Server
from tests.support.tiny import make_tiny


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: runs a real engine on this machine's CPU")
    config.addinivalue_line("markers", "slow: takes longer than ten seconds")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A random Llama of two layers (float32, one token per byte), made once and kept in the cache."""
    root = cache_root() / "tiny"
    with exclusive(root / ".lock"):
        return make_tiny(root)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's folder."""
    return build()


@pytest.fixture
def new_server(tmp_path: Path) -> Callable[..., Server]:
    """Makes a `Server` whose log lies with the test's other files. Starting and stopping it is the test's `with`."""
    numbers = itertools.count()

    def make(model: Path, *args: str, **options: object) -> Server:
        return Server(model, args, log_file=tmp_path / f"server-{next(numbers)}.log", **options)  # type: ignore[arg-type]

    return make
