"""The secret that guards control."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from chunkllm_bridge.common import token


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "chunkllm"


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):o}"


def test_only_the_owner_can_read_it() -> None:
    """File 600 in a folder 700."""
    path = token.write(":8000", "secret")

    assert "secret" == path.read_text()
    assert ("600", "700") == (mode(path), mode(path.parent))


def test_a_folder_that_was_there_is_closed_too(home: Path) -> None:
    """Snapshots may have made it first, open to all."""
    home.mkdir(mode=0o755)
    token.write(":8000", "secret")

    assert "700" == mode(home)


def test_a_file_that_was_there_is_replaced_whole(home: Path) -> None:
    """Its old mode does not survive, and nothing else is left."""
    path = token.write(":8000", "old")
    path.chmod(0o644)
    token.write(":8000", "new")

    assert ("new", "600") == (path.read_text(), mode(path))
    assert [path] == list(home.iterdir())


def test_a_launch_makes_one_token_and_keeps_it() -> None:
    """Children inherit it."""
    environ: dict[str, str] = {}
    made = token.ensure(environ)

    assert 40 < len(made)
    assert made == token.ensure(environ) == environ[token.VARIABLE]
    assert made != token.ensure({})
    assert "given" == token.ensure({token.VARIABLE: "given"})


def test_an_empty_token_opens_no_door() -> None:
    """A variable that is set to nothing is as good as unset."""
    assert 40 < len(token.ensure({token.VARIABLE: ""}))
    assert not token.admits("Bearer ", [""])


@pytest.mark.parametrize(
    ("header", "admitted"),
    [
        ("Bearer one", True),
        ("bearer two", True),
        ("Bearer three", False),
        ("Bearer on", False),
        ("Basic one", False),
        ("one", False),
        ("Bearer", False),
        ("", False),
        (None, False),
        ("Bearer ünd", False),
    ],
)
def test_admits(header: str | None, admitted: bool) -> None:
    """One of the tokens, whole, under the right scheme."""
    assert admitted is token.admits(header, ["one", "two"])


def test_nobody_is_admitted_where_there_is_no_token() -> None:
    assert not token.admits("Bearer x", [])


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (":8000", "http://127.0.0.1:8000/v1"),
        ("localhost:8000", "http://[::1]:8000"),
        (":443", "https://host"),
        (":80", "http://host"),
        ("/run/vllm.sock", "unix:///run/vllm.sock"),
    ],
)
def test_server_and_client_look_in_the_same_place(address: str, url: str) -> None:
    """The server knows where it listens, the client where it calls."""
    assert token.path_for(address) == token.path_for_url(url)
