"""Every way in which an engine is started, each with as few servers as it takes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TINY, House, Running, plugin
from tests.e2e.streams import Client, heard
from tests.support.server import ENGINES, HOME, Server, attempt

pytestmark = pytest.mark.engine

PROMPTS = [f"{number} little words about the number {number}: " for number in range(8)]
TINY_QUOTA = Path(__file__).parents[1] / "plugins" / "tiny_quota"
KEY = "the-servers-own-key"

only_vllm = pytest.mark.parametrize("engine", ["vllm"], indirect=True)


_texts: dict[str, list[str]] = {}  # by engine


def texts(server: Running) -> list[str]:
    return [stream.text for stream in server.streams(PROMPTS, 60)]


@pytest.fixture(scope="class")
def plain(serve: Callable[..., Any], deep_model: Path, engine: str) -> Iterator[Running]:
    """The engine as if we were not installed."""
    with serve(model=deep_model) as running:
        _texts[engine] = texts(running)
        yield running


@pytest.fixture
def expected(serve: Callable[..., Any], deep_model: Path, engine: str) -> list[str]:
    """What the stock engine says, asked once."""
    if engine not in _texts:
        with serve(model=deep_model) as running:
            _texts[engine] = texts(running)
    return _texts[engine]


class TestWithout:
    def test_nothing_of_ours_is_there(self, plain) -> None:
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed with pip into a folder of its own."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(site), str(TINY_QUOTA)], check=True)
    return site


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("spec") / "chunkllm.toml"
    file.write_text("plugin.priority = 40\n\n[plugins.tiny_quota]\nblocks = 7\npriority = 60\n")
    return file


@pytest.fixture(scope="class")
def guest(serve: Callable[..., Any], deep_model: Path, site: Path, spec_file: Path) -> Iterator[Running]:
    flags = ("--plugin", "chunkllm", "--plugin-config", str(spec_file), "--api-key", KEY)
    options: dict[str, Any] = {"model": deep_model, "other": True, "key": KEY, "env": {"PYTHONPATH": str(site)}}
    with serve(*flags, **options) as running:
        yield running


class TestOtherPackages:
    """A third party's plugin, a spec file, an API key, and the other way in, all on one server."""

    def test_a_plugin_of_thirty_lines(self, guest, expected) -> None:
        """Found by its entry point, seated by the spec file, in the server's status; after requests it was called, its
        limit of seven blocks held, and the texts are the stock engine's."""
        seated = plugin(guest.status(), "tiny_quota")
        streams = guest.streams(PROMPTS, 60)
        status = guest.wait_idle()
        active = plugin(status, "tiny_quota")

        assert expected == [stream.text for stream in streams]
        assert ("0.1", 60, ["blocks"]) == (seated["version"], seated["priority"], seated["seams"])
        assert "active" == active["state"]
        assert not set(active["failures"]) - {"deadline"}  # a busy machine may take the core away from any call
        assert active["calls"]["plan_blocks"] >= status["kv"]["steps"]
        assert active["calls"]["settle"] == status["kv"]["steps"]
        assert (7, 0) == (status["kv"]["limit"], status["kv"]["violations"])
        assert status["kv"]["peak_ever"] <= 7
        row = next(row for row in guest.json("plugins", "list")["plugins"] if row["name"] == "tiny_quota")
        assert "chunkllm-tiny-quota 0.1" in row["source"]

    def test_its_own_settings_change_while_serving(self, guest) -> None:
        """`set plugins.tiny_quota.blocks=3`: a new generation of it; what its Config refuses changes nothing."""
        before = plugin(guest.status(), "tiny_quota")
        reply = guest.json("set", "plugins.tiny_quota.blocks=3")
        refused = guest.control("set", {"set": {"plugins.tiny_quota.blocks": 0}})
        after = guest.status()

        assert 3 == reply["kv"]["limit"] == after["kv"]["limit"]
        assert before["generation"] < plugin(after, "tiny_quota")["generation"]
        assert 422 == refused.status_code, refused.text

    def test_good_specs_are_kept_beside_the_file(self, guest, spec_file) -> None:
        """The effective spec is written at start and after each change: what a rollback returns to."""
        folder = spec_file.parent / "chunkllm-state"
        written = len(list(folder.glob("spec-*.json")))
        guest.set(plugin__priority=41)

        assert written >= 1
        assert written + 1 == len(list(folder.glob("spec-*.json")))
        newest = json.loads(max(folder.glob("spec-*.json")).read_text())
        assert 41 == newest["values"]["plugin.priority"][0]

    def test_the_api_key_is_the_control_token(self, guest) -> None:
        """With `--api-key` there is one secret, and no token file."""
        assert 200 == guest.control("status", key=KEY).status_code
        assert 401 == guest.control("status", key="another").status_code
        assert 401 == guest.http.get("/chunkllm/status").status_code
        assert 0 == guest.chunkllm("status", "--url", guest.server.url, "--token", KEY).returncode
        assert not guest.token_file.exists()


@pytest.fixture(scope="class")
def pair(serve: Callable[..., Any], house: House) -> Iterator[Running]:
    share = f"kv_cache.memory_ratio={house.ratio(40, TINY)}"
    with serve("--api-server-count", "2", "--plugin", "chunkllm", "--plugin-set", share) as running:
        yield running


@only_vllm
class TestApiServers:
    """`--api-server-count 2`: two processes take requests for one engine."""

    def test_counters_are_not_doubled(self, pair) -> None:
        """What the engine counted is there once, what each server saw is summed (vllm#7279, kserve#2979)."""
        pair.quota(9)
        tokens = 90
        for _ in range(3):
            assert all(tokens == len(stream.text) for stream in pair.streams(PROMPTS, tokens))
        kv = pair.wait_idle()["kv"]

        pair.wait_for_metric(kv["denied"], "kv_denied_total")
        assert 0 < kv["denied"]
        pair.wait_for_metric(3 * 8 * (tokens - 1), "inter_token_latency_seconds_count")
        metrics = pair.metrics()
        theirs = sum(v for k, v in metrics.items() if k.startswith("vllm:inter_token_latency_seconds_count"))
        assert theirs == pair.ours("inter_token_latency_seconds_count")
        for name in ("preempted", "overdrafts", "violations"):
            assert kv[name] == pair.ours(f"kv_{name}_total")
        assert (9, 40) == (pair.ours("kv_limit_blocks"), pair.ours("kv_total_blocks"))
        assert 40 == pair.ours("kv_blocks")
        assert 1 == pair.ours("info") == pair.ours("ranks_in_step")

    def test_each_of_them_takes_commands(self, pair) -> None:
        """Whichever answers, it is one engine: the same token, the same status."""
        headers = {"Authorization": f"Bearer {pair.key}"}
        answers = [httpx.get(f"{pair.server.url}/chunkllm/status", headers=headers).json() for _ in range(12)]

        assert 1 == len({(status["generation"], status["fingerprint"], status["kv"]["steps"]) for status in answers})


@pytest.fixture(scope="class")
def ranks(serve: Callable[..., Any], house: House, deep_model: Path) -> Iterator[Running]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    bind = {house.bind: f"{cores[0]}|{cores[1]}"}
    with serve(house.ranks, "2", "--plugin", "chunkllm", model=deep_model, env=bind) as running:
        yield running


class TestTensorParallel:
    def test_every_rank_moves_together(self, ranks, expected) -> None:
        """Two ranks, one engine: a change is in force on both or on none, and the tokens are those of one rank
        (kvcached#372)."""
        before = ranks.status()
        ranks.quota(9)
        texts = [stream.text for stream in ranks.streams(PROMPTS, 60)]
        refused = ranks.control("set", {"set": {"kv_cache.memory_ratio": 0.9}})
        after = ranks.wait_idle()

        assert expected == texts
        assert 409 == refused.status_code
        for status in (before, after):
            assert (2, True) == (status["ranks"], status["in_step"])
            assert [0, 1] == [worker["rank"] for worker in status["workers"]]
            assert {status["fingerprint"]} == {worker["fingerprint"] for worker in status["workers"]}
        assert before["fingerprint"] != after["fingerprint"]
        assert (9, 0) == (after["kv"]["limit"], after["kv"]["violations"])
        assert 0 < after["kv"]["peak"] <= 9
        ranks.wait_for_metric(1, "ranks_in_step")


@only_vllm
class TestBench:
    def test_the_benchmarks_take_the_flag(self, house: House, tiny_model: Path, tmp_path: Path, engine: str) -> None:
        """`vllm bench` runs with the bridge attached: what is measured is what is served."""
        script = ENGINES["vllm"].argv(HOME, "", "", 0)[0]
        flags = ("--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "8")
        argv = [script, "bench", "throughput", "--model", str(tiny_model), *house.args, *flags, "--num-prompts", "4"]
        quota = ("--plugin", "chunkllm", "--plugin-set", f"kv_cache.memory_ratio={house.ratio(40, TINY)}")
        env = {**os.environ, **ENGINES["vllm"].env, **house.env, "XDG_STATE_HOME": str(tmp_path)}
        env = {key: value for key, value in {**env, "VLLM_LOGGING_LEVEL": "INFO"}.items() if value is not None}

        done = subprocess.run([*argv, *quota], env=env, capture_output=True, text=True, timeout=300, check=False)

        assert 0 == done.returncode, done.stdout + done.stderr
        assert "Throughput: " in done.stdout
        attached = next(line for line in (done.stdout + done.stderr).splitlines() if "bridge.attached" in line)
        assert "blocks=40" in attached


class TestMistakes:
    def test_before_the_model_is_loaded(self, engine: str, house: House, tmp_path: Path) -> None:
        """A wrong spec: exit code 2 and every mistake, though the model does not even exist."""
        sets = ("plugin.priority=100", "kv_cache.memory_ratoi=0.1")
        flags = ["--plugin", "chunkllm", *(word for item in sets for word in ("--plugin-set", item))]
        server = Server("/no/such/model", flags, engine=engine, env=house.env, log_file=tmp_path / "log")

        with attempt(server):
            said = server.log()

        assert 2 == server.process.returncode, said
        assert "2 mistakes in the plugin spec" in said
        assert "kv_cache.memory_ratio?" in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_the_main_job_on_a_real_model(serve, smollm2: Path) -> None:
    """SmolLM2, eight streams, the quota cut to a quarter and raised again while they run: never more held than allowed,
    every text the one of a run without a quota, the pool free at the end."""
    tokens, whole, quarter = 96, 32, 8
    prompts = [f"Here are {number} things that everybody should know about the sea:" for number in range(2, 10)]
    readings: list[dict[str, Any]] = []
    with serve("--plugin", "chunkllm", model=smollm2) as server:
        server.quota(whole)
        expected = [stream.text for stream in server.streams(prompts, tokens)]

        async def meanwhile(clients: list[Client]) -> None:
            await heard(clients, 32)
            cut = (await asyncio.to_thread(server.quota, quarter))["kv"]
            now = cut
            while now["steps"] < cut["steps"] + 40 or now["preempted"] == cut["preempted"]:
                now = (await asyncio.to_thread(server.status))["kv"]
                if now["steps"] > cut["steps"]:
                    readings.append(now)
            await asyncio.to_thread(server.quota, whole)

        streams = server.under_load(prompts, tokens, meanwhile)
        kv = server.wait_idle()["kv"]

    assert set(zip(prompts, expected, strict=True)) == {(stream.prompt, stream.text) for stream in streams}
    assert len(set(expected)) > 4
    assert 0 < max(reading["held"] for reading in readings) <= quarter
    assert max(reading["peak"] for reading in readings) <= quarter
    assert 0 < kv["preempted"]
    assert (0, kv["total"], True) == (kv["violations"], kv["free"] + kv["cached"], kv["conserved"])
