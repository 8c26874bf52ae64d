"""Every way in which an engine is started, each with as few servers as it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import DEEP, House, Running, eventually, plugin
from tests.e2e.streams import run_streams
from tests.support.server import ENGINES, Server, attempt

pytestmark = pytest.mark.engine

PROMPTS = [f"{number} little words about the number {number}: " for number in range(8)]
TINY_QUOTA = Path(__file__).parents[1] / "plugins" / "tiny_quota"

only_vllm = pytest.mark.parametrize("engine", ["vllm"], indirect=True)


@pytest.fixture(scope="module")
def plain(serve: Callable[..., Any], deep_model: Path) -> Iterator[Running]:
    """The engine as if we were not installed."""
    with serve(model=deep_model) as running:
        yield running


@pytest.fixture(scope="module")
def expected(plain: Running) -> list[str]:
    """What the stock engine says."""
    return [stream.text for stream in run_streams(plain.server, PROMPTS, 60)]


class TestWithout:
    def test_nothing_of_ours_is_there(self, plain, expected) -> None:
        """Installed, but not asked for: no routes, no metrics, no token, nothing in the log."""
        for path in ("status", "config", "plugins"):
            assert 404 == plain.http.get(f"/chunkllm/{path}").status_code
        assert 404 == plain.http.post("/chunkllm/set", json={"set": {"plugin.priority": 3}}).status_code
        assert not [name for name in plain.metrics() if name.startswith("chunkllm")]
        assert not plain.state.exists()
        assert "chunkllm:" not in plain.server.log()

    def test_the_command_line_says_what_to_do(self, plain) -> None:
        """`chunkllm status` against it: exit code 1, and the flag that is missing."""
        done = plain.chunkllm("status", "--url", plain.server.url)

        assert 1 == done.returncode
        assert "--plugin chunkllm" in done.stderr


class TestOtherPackages:
    @pytest.fixture(scope="class")
    def site(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A third party's package, installed with pip into a folder of its own."""
        site = tmp_path_factory.mktemp("site")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "--target", str(site), str(TINY_QUOTA)], check=True)
        return site

    @pytest.fixture(scope="class")
    def server(self, serve: Callable[..., Any], deep_model: Path, site: Path, tmp_path_factory) -> Iterator[Running]:
        file = tmp_path_factory.mktemp("spec") / "chunkllm.toml"
        file.write_text("plugin.priority = 40\n\n[plugins.tiny_quota]\nblocks = 7\npriority = 60\n")
        options: dict[str, Any] = {"model": deep_model, "env": {"PYTHONPATH": str(site)}}
        with serve("--plugin", "chunkllm", "--plugin-config", str(file), **options) as running:
            running.spec_file = file
            yield running

    def test_a_plugin_of_thirty_lines(self, server, expected) -> None:
        """Found by its entry point, seated by the spec file, in the server's status; after requests it was called, its
        limit of seven blocks held, and the texts are the stock engine's."""
        seated = plugin(server.status(), "tiny_quota")
        streams = run_streams(server.server, PROMPTS, 60)
        status = server.wait_idle()
        active = plugin(status, "tiny_quota")

        assert expected == [stream.text for stream in streams]
        assert ("0.1", 60, ["blocks"]) == (seated["version"], seated["priority"], seated["seams"])
        assert ("active", {}) == (active["state"], active["failures"])
        assert active["calls"]["plan_blocks"] >= status["kv"]["steps"]
        assert active["calls"]["settle"] == status["kv"]["steps"]
        assert (7, 0) == (status["kv"]["limit"], status["kv"]["violations"])
        assert status["kv"]["peak_ever"] <= 7
        row = next(row for row in server.json("plugins", "list")["plugins"] if row["name"] == "tiny_quota")
        assert "chunkllm-tiny-quota 0.1" in row["source"]

    def test_its_own_settings_change_while_serving(self, server) -> None:
        """`set plugins.tiny_quota.blocks=3`: a new generation of it, and its count goes on."""
        before = plugin(server.status(), "tiny_quota")
        reply = server.json("set", "plugins.tiny_quota.blocks=3")
        after = server.status()

        assert 3 == reply["kv"]["limit"] == after["kv"]["limit"]
        assert before["generation"] < plugin(after, "tiny_quota")["generation"]
        assert 422 == server.control("set", {"set": {"plugins.tiny_quota.blocks": 0}}).status_code

    def test_good_specs_are_kept_beside_the_file(self, server) -> None:
        """The effective spec is written at start and after each change: what a rollback returns to."""
        folder = server.spec_file.parent / "chunkllm-state"
        written = len(list(folder.glob("spec-*.json")))
        server.set(plugin__priority=41)

        assert written >= 1
        assert written + 1 == len(list(folder.glob("spec-*.json")))
        newest = json.loads(max(folder.glob("spec-*.json")).read_text())
        assert 41 == newest["values"]["plugin.priority"][0]


@only_vllm
class TestApiServerModule:
    """`python -m vllm.entrypoints.openai.api_server`, which needs no console script, with an API key."""

    KEY = "the-servers-own-key"

    @pytest.fixture(scope="class")
    def server(self, serve, house: House, deep_model: Path, engine) -> Iterator[Running]:
        argv = ENGINES["vllm"].argv
        module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
        ENGINES["vllm"].__setattr__ if False else None
        share = f"kv_cache.memory_ratio={house.ratio(40, DEEP)}"
        flags = ("--plugin", "chunkllm", "--plugin-set", share, "--api-key", self.KEY)
        with serve(*flags, model=deep_model, argv=[*module, *argv(str(deep_model), "", 0)[2:3]]) as running:
            yield running
