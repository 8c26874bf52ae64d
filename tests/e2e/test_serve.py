"""One real server of a tiny model with the bridge: control, quotas, metrics, and people who misuse them."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import DEEP, PATIENCE, House, Running, eventually, plugin
from tests.e2e.streams import Client, heard

pytestmark = pytest.mark.engine

POOL = 80  # blocks; eight streams of the tests below want 8 x 9
PROMPTS = [f"{number} little words about the number {number}: " for number in range(8)]
TOKENS = 240


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], house: House, deep_model: Path) -> Iterator[Running]:
    share = f"kv_cache.memory_ratio={house.ratio(POOL, DEEP)}"
    with serve("--plugin", "chunkllm", "--plugin-set", share, model=deep_model) as running:
        yield running


@pytest.fixture(autouse=True)
def free(server: Running) -> Iterator[None]:
    """Every test finds the whole pool free and leaves it so."""
    server.quota(POOL)
    yield
    kv = server.wait_idle()["kv"]
    assert POOL == kv["free"] + kv["cached"]
    assert kv["conserved"]
    assert 0 == kv["violations"]


@pytest.fixture(scope="module")
def expected(server: Running) -> list[str]:
    """The eight texts with the whole pool."""
    return [stream.text for stream in server.streams(PROMPTS, TOKENS)]


class TestToken:
    @pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic {}", "{}"])
    @pytest.mark.parametrize("path", ["status", "config", "plugins", "set"])
    def test_control_needs_the_token(self, server, path, header) -> None:
        """Without it, or with another, 401 and nothing told; models are served to anybody as before."""
        headers = {} if header is None else {"Authorization": header.format(server.key)}
        method = "POST" if path == "set" else "GET"
        response = server.http.request(method, f"/chunkllm/{path}", headers=headers, json={"set": {"a": 1}})

        assert (401, ["error"]) == (response.status_code, list(response.json()))
        assert 200 == server.http.get("/v1/models").status_code

    def test_it_lies_where_only_its_owner_reads(self, server) -> None:
        """The file is 0600, its folder 0700, and the token is in no log."""
        assert 0o600 == stat.S_IMODE(server.token_file.stat().st_mode)
        assert 0o700 == stat.S_IMODE(server.token_file.parent.stat().st_mode)
        assert len(server.key) >= 32
        assert server.key not in server.server.log()

    def test_our_routes_are_not_in_the_public_schema(self, server) -> None:
        """OpenAPI lists what clients may call; control is not theirs."""
        assert "chunkllm" not in server.http.get("/openapi.json").text


class TestCommands:
    def test_status(self, server, engine) -> None:
        """HTTP and command line say the same: pool, requests, plugins, every rank in step."""
        by_http, by_command = server.status(), server.json("status")
        table = server.chunkllm("status", "--url", server.server.url)

        assert by_http.keys() == by_command.keys()
        assert (engine, 1, True) == (by_http["engine"], by_http["ranks"], by_http["in_step"])
        assert (POOL, POOL) == (by_http["kv"]["total"], by_http["kv"]["limit"])
        assert ["batch_window", "paged_kv"] == [row["name"] for row in by_http["plugins"]]
        assert [by_http["fingerprint"]] == [worker["fingerprint"] for worker in by_http["workers"]]
        assert 0 == table.returncode
        for word in (engine, "paged_kv", "batch_window", by_http["fingerprint"]):
            assert word in table.stdout

    def test_active_means_called(self, server) -> None:
        """A plugin's calls on the step path are counted: after a request there are more (embedl/flash-head)."""
        before = plugin(server.status(), "paged_kv")["calls"]["plan_blocks"]
        server.complete("Hello", 20)
        after = plugin(server.status(), "paged_kv")

        assert "active" == after["state"]
        assert after["calls"]["plan_blocks"] >= before + 20
        assert {} == after["failures"]

    def test_config(self, server, house) -> None:
        """Every parameter's effective value and where it came from, before and after a change."""
        server.set(plugin__batch_window="8ms")
        by_http = server.control("config").json()
        rows = {row["key"]: row for row in server.json("config", "show")["parameters"]}

        assert by_http["parameters"] == list(rows.values())
        assert "cpu" == by_http["profile"]
        window = rows["plugin.batch_window"]
        assert ("8ms", "set while serving") == (window["value"], window["source"])
        assert "default" == rows["speculative.tokens"]["source"]
        server.set(plugin__batch_window="off")

    def test_plugins(self, server) -> None:
        """What is installed, and which of it has a seat."""
        rows = {row["name"]: row for row in server.json("plugins", "list")["plugins"]}

        assert list(rows.values()) == server.control("plugins").json()["plugins"]
        assert ["blocks"] == rows["paged_kv"]["seams"]
        assert "chunkllm-bridge" in rows["paged_kv"]["source"]

    def test_set(self, server) -> None:
        """Takes effect at once, on every rank, and says what it changed; the command line too."""
        before = server.status()
        share = 0.5 * before["kv"]["memory_ratio_max"]
        reply = server.json("set", f"kv_cache.memory_ratio={share}")
        text = server.chunkllm("set", "plugin.priority=7", "--url", server.server.url)
        after = server.status()

        assert ["kv_cache.memory_ratio"] == list(reply["changed"])
        assert before["generation"] + 2 == after["generation"]
        assert POOL // 2 == after["kv"]["limit"]
        assert after["in_step"]
        assert before["fingerprint"] != after["fingerprint"]
        assert 0 == text.returncode
        assert "plugin.priority: 50 -> 7" in text.stdout
        server.set(plugin__priority=50)

    def test_exit_codes(self, server) -> None:
        """0 done; 1 the server refused or is not there; 2 what was given is wrong. With --json the answer is JSON."""
        url = ("--url", server.server.url)
        for code, words, said in (
            (1, ("set", "kv_cache.memory_ratio=0.9", *url), "needs a restart"),
            (2, ("set", "kv_cache.memory_ratoi=0.1", *url), "kv_cache.memory_ratio?"),
            (1, ("status", "--url", "http://127.0.0.1:9"), "no server answers"),
            (1, ("status", "--token", "wrong", *url), "token"),
            (2, ("set", "kv_cache.memory_ratio", *url), "KEY=VALUE"),
            (2, ("status", "--no-such-option"), "--no-such-option"),
        ):
            done = server.chunkllm(*words)
            assert (code, True) == (done.returncode, said in done.stderr), (words, done)
            if "--no-such-option" not in words:
                again = server.chunkllm(*words, "--json")
                assert (code, False) == (again.returncode, json.loads(again.stdout)["ok"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"", 400),
            (b"not json", 400),
            (b"[1, 2]", 400),
            (b"null", 400),
            (b'"set"', 400),
            (b"{}", 400),
            (b'{"set": {}}', 400),
            (b'{"set": []}', 400),
            (b'{"set": "kv_cache.memory_ratio=0.1"}', 400),
            (b"[" * 60_000, 400),
            (b" " * 100_000, 413),
            (b'{"set": {"plugin.priority": ' + b"[" * 500 + b"]" * 500 + b"}}", 400),
            (b'{"set": {"plugin.priority": 1' + b"0" * 60 + b"}}", 400),
            (b'{"set": {"kv_cache.memory_ratio": NaN}}', 422),
            (b'{"set": {"kv_cache.memory_ratio": Infinity}}', 422),
            (b'{"set": {"kv_cache.memory_ratio": null}}', 422),
            (b'{"set": {"kv_cache.memory_ratio": true}}', 422),
            (b'{"set": {"kv_cache.memory_ratio": -0.1}}', 422),
            (b'{"set": {"kv_cache": {"memory_ratio": 7}}}', 422),
            (b'{"set": {"plugin.priority": "\\ud800"}}', 400),
            (b'{"set": {"\\ud800": 1}}', 400),
            (b'{"set": {"": 1}}', 422),
            (b'{"set": {"....": 1}}', 422),
            (b'{"set": {"plugins.paged_kv.nonsense": 1}}', 422),
            (b'{"set": {"plugin.hot_reload": "paged_kv"}}', 422),
            (b'{"set": {"kv_cache.strategy": "paged", "kv_cache.max_layer_bytes": 5}}', 422),
        ],
        ids=lambda value: value[:60].decode() if isinstance(value, bytes) else str(value),
    )
    def test_a_malformed_change(self, server, body, status) -> None:
        """Answered with 4xx and a reason; nothing changes, and the server lives."""
        before = server.status()
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        response = server.http.post("/chunkllm/set", content=body, headers=headers)

        assert status == response.status_code, response.text
        assert response.json()["error"]
        after = server.status()
        assert before["generation"] == after["generation"]
        assert before["fingerprint"] == after["fingerprint"]
        assert server.complete("Hello", 2)

    def test_unknown_keys_are_answered_with_the_nearest(self, server) -> None:
        """All mistakes of one change at once, each with the key that was meant (vllm#35573)."""
        body = {"set": {"kv_cache.memory_ratoi": 0.1, "plugin.batch_windw": "8ms", "plugin.priority": 100}}
        reply = server.control("set", body)

        assert 422 == reply.status_code
        problems = "\n".join(reply.json()["problems"])
        assert 3 == len(reply.json()["problems"])
        for part in ("kv_cache.memory_ratio?", "plugin.batch_window?", "plugin.priority = 100"):
            assert part in problems

    def test_more_than_the_pool(self, server) -> None:
        """409, with what the pool has; a larger one needs a restart."""
        reply = server.control("set", {"set": {"kv_cache.memory_ratio": 0.3}})

        assert 409 == reply.status_code
        assert f"{POOL} blocks" in reply.json()["error"]

    def test_other_methods_and_paths(self, server) -> None:
        """405 and 404, as for any route."""
        headers = {"Authorization": f"Bearer {server.key}"}
        assert 405 == server.http.get("/chunkllm/set", headers=headers).status_code
        assert 405 == server.http.post("/chunkllm/status", headers=headers).status_code
        assert 404 == server.http.get("/chunkllm/nothing", headers=headers).status_code


class TestQuota:
    def test_a_quarter_while_eight_streams_run(self, server, expected) -> None:
        """The quota is cut to a quarter of the pool and raised again while eight streams run: at every reading no more
        is held than allowed, nothing is lost, all texts are those of a run without a quota, the pool is free at the
        end (kvcached#262)."""
        quarter, readings = POOL // 4, []

        async def meanwhile(clients: list[Client]) -> None:
            await heard(clients, 64)
            cut = (await asyncio.to_thread(server.quota, quarter))["kv"]
            now = cut
            while now["steps"] < cut["steps"] + 80 or now["preempted"] == cut["preempted"]:
                now = (await asyncio.to_thread(server.status))["kv"]
                if now["steps"] > cut["steps"]:
                    readings.append(now)
            await asyncio.to_thread(server.quota, POOL)

        streams = server.under_load(PROMPTS, TOKENS, meanwhile)

        assert {"length"} == {stream.ended for stream in streams}
        assert set(zip(PROMPTS, expected, strict=True)) == {(stream.prompt, stream.text) for stream in streams}
        assert {TOKENS} == {len(stream.text) for stream in streams}
        assert all(kv["conserved"] for kv in readings)
        assert 0 < max(kv["held"] for kv in readings) <= quarter
        assert max(kv["peak"] for kv in readings) <= quarter
        kv = server.wait_idle()["kv"]
        assert 0 < kv["preempted"]
        assert 0 < kv["denied"]

    def test_smaller_than_one_request(self, server, expected) -> None:
        """A block of quota, where each wants several: one at a time goes beyond it, and all finish with their text."""
        before = server.quota(1)["kv"]
        streams = server.streams(PROMPTS[:3], 60)
        after = server.status()["kv"]

        assert [text[:60] for text in expected[:3]] == [stream.text for stream in streams]
        assert before["overdrafts"] < after["overdrafts"]
        assert after["peak"] <= 4  # of one request

    def test_clients_that_leave_give_their_blocks_back(self, server, expected) -> None:
        """Clients that break off, while running or waiting under a small quota: nothing stays held, and the next ones
        are served (vllm#46283, vllm#44100)."""
        server.quota(POOL // 8)

        async def leave() -> None:
            async with server.connect() as http:
                asks = (Client(prompt).ask(http, server.server.model, 900, asyncio.Event()) for prompt in PROMPTS)
                tasks = [asyncio.create_task(asking) for asking in asks]
                async with asyncio.timeout(PATIENCE):
                    while not (await asyncio.to_thread(server.status))["requests"]["waiting"]:
                        pass
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(leave())

        server.wait_idle()
        assert expected[0][:40] == server.complete(PROMPTS[0], 40)

    def test_a_window_holds_and_lets_go(self, server, expected) -> None:
        """With a batch window that is changed while streams run, every stream gets its text."""
        server.set(plugin__batch_window="12ms")
        streams = server.streams(PROMPTS, 40)
        held = server.status()["kv"]["window_holds"]
        server.set(plugin__batch_window="off")
        again = server.streams(PROMPTS, 40)

        for done in (streams, again):
            assert [text[:40] for text in expected] == [stream.text for stream in done]
        assert 0 < held == server.status()["kv"]["window_holds"]


class TestMetrics:
    def test_they_say_what_status_says(self, server) -> None:
        """The states of blocks sum to the total, every number is the status' own (vllm#20302)."""
        server.quota(POOL // 2)
        server.complete("Hello", 40)
        status = server.wait_idle()
        kv = status["kv"]
        server.wait_for_metric(status["generation"], "generation")
        server.wait_for_metric(kv["steps"] and kv["cached"], "kv_blocks", state="cached")

        by_state = {state: server.ours("kv_blocks", state=state) for state in ("free", "held", "cached")}
        assert {state: kv[state] for state in by_state} == by_state
        assert POOL == server.ours("kv_total_blocks") == sum(by_state.values())
        assert POOL // 2 == server.ours("kv_limit_blocks")
        assert 1 == server.ours("kv_conserved") == server.ours("info", fingerprint=status["fingerprint"])
        assert 1 == server.ours("plugin_active", plugin="paged_kv")
        for name in ("denied", "preempted", "overdrafts", "violations"):
            assert kv[name] == server.ours(f"kv_{name}_total")
        for state in ("running", "waiting"):
            assert 0 == server.ours("requests", state=state)

    def test_counters_never_go_back(self, server) -> None:
        """A new generation of a plugin counts from zero; the counter on /metrics goes on."""
        server.complete("Hello", 30)
        calls = plugin(server.status(), "paged_kv")["calls"]["plan_blocks"]
        eventually(
            lambda: server.ours("plugin_calls_total", plugin="paged_kv", verb="plan_blocks") >= calls, lambda: "calls"
        )
        before = server.ours("plugin_calls_total", plugin="paged_kv", verb="plan_blocks")

        status = server.quota(POOL // 2)
        server.wait_for_metric(status["generation"], "generation")

        assert server.ours("plugin_calls_total", plugin="paged_kv", verb="plan_blocks") >= before

    def test_inter_token_latencies_are_counted(self, server) -> None:
        """Each request adds its tokens less one, whether it streams or not."""
        before = server.ours("inter_token_latency_seconds_count")
        server.complete("Hello", 30)
        server.streams(PROMPTS[:2], 20)

        server.wait_for_metric(before + 29 + 2 * 19, "inter_token_latency_seconds_count")
        assert 0 < server.ours("inter_token_latency_seconds_sum")

    def test_the_p99_is_published(self, server) -> None:
        """Once requests ran, the p99 of the last minute and its alarm are there."""
        server.complete("Hello", 30)
        eventually(lambda: server.ours("itl_p99_seconds") > 0, lambda: "no p99")

        assert any(key.startswith("chunkllm_itl_alarm{") for key in server.metrics())
