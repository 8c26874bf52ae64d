"""SGLang's engine in a Python program with a model: the bridge on it, off it, and with plugins that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang

from chunkllm_bridge.common.control import Set, Status
from chunkllm_bridge.common.errors import ConfigError, ControlError, IncompatibleError
from chunkllm_bridge.sglang import Engine, info
from tests.engines.conftest import plugin_source
from tests.support import bare

PAGE, PAGES = 16, 100
WORDS = ("sea", "ship", "moon", "x = [1]", "def f():", "red", "Grüße", "the", "Once upon a time")
PREFIX = " ".join(random.Random(7).choices(WORDS, k=30))
"""Longer than a chunk of the prefill, and shared by every second prompt."""


def prompts(count: int) -> list[str]:
    choice = random.Random(3)
    return [
        (PREFIX if number % 2 else "") + " ".join(choice.choices(WORDS, k=choice.randint(1, 40)))
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def started(tiny_model: Path) -> Callable[..., Any]:
    """Starts an engine of a class (stock or ours) as a context; each takes some 15 seconds."""

    @contextlib.contextmanager
    def start(cls: type, **options: Any) -> Iterator[Any]:
        defaults = {
            "model_path": str(tiny_model),
            "dtype": "float32",
            "device": "cpu",
            "page_size": PAGE,
            "max_total_tokens": PAGE * PAGES,
            "mem_fraction_static": 0.5,
            "chunked_prefill_size": 64,
            "max_running_requests": 12,
            "log_level": "error",
        }
        engine = cls(**{**defaults, **options})
        try:
            yield engine
        finally:
            engine.shutdown()

    return start


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Nothing is compiled for a model so small, and other tests may run beside."""
    patch = pytest.MonkeyPatch()
    patch.setenv("CHUNKLLM_CPU_COMPILE", "0")
    patch.setenv("OMP_NUM_THREADS", "1")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def expected(started) -> list[list[int]]:
    """What the stock engine says."""
    with started(sglang.Engine) as engine:
        assert not hasattr(engine, "chunkllm")
        return answers(engine)


@pytest.fixture(scope="class")
def engine(started, expected) -> Iterator[Any]:
    """One with the bridge, whose quota each test sets anew. No other may live beside it: `Engine.shutdown` ends every
    child of the process, and who then finds that its scheduler is gone ends the process."""
    with started(Engine, plugin="chunkllm") as engine:
        yield engine


SAMPLING = [{"temperature": 0, "max_new_tokens": 20 + 9 * (number % 9), "ignore_eos": True} for number in range(16)]


def answers(engine: Any) -> list[list[int]]:
    return [output["output_ids"] for output in engine.generate(prompts(16), SAMPLING)]


def plugin(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in status["plugins"] if row["name"] == name)


def ratio(status: dict[str, Any], blocks: int) -> float:
    """The `kv_cache.memory_ratio` that lets requests hold so many blocks."""
    kv = status["kv"]
    return float((blocks + 0.5) / (kv["total"] + 1) * kv["memory_ratio_max"])


class TestQuota:
    def test_same_tokens_under_a_quota(self, engine, expected) -> None:
        """Sixteen prompts get exactly the stock engine's tokens while they may hold 40 blocks, then 12, 3, and all of
        them; nothing is held in the end, and the plugin is seen at work."""
        for blocks in (40, 12, 3, PAGES):
            before = engine.chunkllm.status()
            engine.chunkllm.set({"kv_cache.memory_ratio": ratio(before, blocks)})

            assert expected == answers(engine)

            status = engine.chunkllm.status()
            kv = status["kv"]
            assert (blocks, 0, 0, True) == tuple(kv[key] for key in ("limit", "held", "violations", "conserved"))
            assert 0 < kv["peak"] <= max(blocks, 45)  # one that is alone may go beyond
            assert kv["steps"] - before["kv"]["steps"] >= 80
            assert "active" == plugin(status, "paged_kv")["state"]
            assert status["in_step"]
            assert ["worker"] == [worker["role"] for worker in status["workers"]]

    def test_cached_prefixes_are_not_held(self, engine) -> None:
        """What the radix cache keeps for nobody in particular counts as cached, and gives way to requests."""
        answers(engine)
        kv = engine.chunkllm.status()["kv"]

        assert 0 == kv["held"]
        assert kv["cached"] > 0
        assert kv["total"] == kv["free"] + kv["cached"]

    def test_whatever_happens_while_it_serves(self, engine, expected) -> None:
        """The quota jumps between one block and all of them hundreds of times, windows open and close and clients
        leave, while requests run: every text that was finished is the stock engine's, nothing is held at the end, and
        no reading shows more held than allowed by more than one request (kvcached#262, vllm#46283)."""
        chance, line = random.Random(11), engine.tokenizer_manager.chunkllm.line
        total = engine.chunkllm.status()
        tasks: list[asyncio.Task[Any]] = []

        async def ask(number: int) -> tuple[list[int], str]:
            rid = f"request-{number}-{chance.random()}"
            asking = asyncio.ensure_future(engine.async_generate(prompts(16)[number], SAMPLING[number], rid=rid))
            if number % 5 == 4:
                await asyncio.wait({asking}, timeout=chance.random())
                engine.tokenizer_manager.abort_request(rid=rid)
            answer = await asking
            return answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]

        async def disturb() -> None:
            while not all(task.done() for task in tasks):
                blocks, window = chance.choice([1, 2, 5, 10, 20, 40, PAGES]), chance.choice([0, 5, 50])
                values = {"kv_cache.memory_ratio": ratio(total, blocks), "plugin.batch_window": f"{window}ms"}
                reply = await line.send(Set(values=values))
                assert not reply.error
                for _ in range(chance.randint(1, 4)):
                    status = (await line.send(Status())).data
                    kv, running = status["kv"], status["requests"]["running"]
                    assert kv["conserved"] and status["in_step"]
                    if kv["steps"] > reply.data["kv"]["steps"]:
                        assert kv["held"] <= kv["limit"] or running <= 1

        async def everything() -> list[tuple[list[int], str]]:
            tasks.extend(asyncio.ensure_future(ask(number)) for number in range(16))
            *outcomes, _ = await asyncio.gather(*tasks, disturb())
            return outcomes

        outcomes = engine.loop.run_until_complete(everything())
        engine.chunkllm.set({"kv_cache.memory_ratio": ratio(total, PAGES), "plugin.batch_window": "off"})

        wrong = [number for number, (ids, why) in enumerate(outcomes) if why != "abort" and ids != expected[number]]
        assert [] == wrong
        assert sum(why == "length" for _, why in outcomes) >= 12
        kv = engine.chunkllm.status()["kv"]
        assert (0, 0) == (kv["held"], kv["violations"])
        assert 0 < kv["preempted"]

    def test_a_refused_change_leaves_everything_as_it_was(self, engine) -> None:
        """Unknown keys, values out of range, what is fixed at start, more than the pool has: refused with the reason,
        and the same config, generation and limit stand."""
        before = engine.chunkllm.config(), engine.chunkllm.status()

        for values, status, reason in (
            ({"kv_cache.memory_ratoi": 0.1}, 422, "kv_cache.memory_ratio"),
            ({"kv_cache.memory_ratio": 2}, 422, "memory_ratio = 2"),
            ({"plugin.priority": 1, "kv_cache.max_layer_bytes": 1}, 422, "cannot change while serving"),
            ({"kv_cache.memory_ratio": 0.3}, 409, f"{PAGES} blocks"),
            ({"plugins.medusa.priority": 3}, 422, "medusa"),
        ):
            with pytest.raises(ControlError, match=reason) as refusal:
                engine.chunkllm.set(values)
            assert status == refusal.value.status

        after = engine.chunkllm.config(), engine.chunkllm.status()
        for _, status in (before, after):  # a status is a command, and asks for the limit
            for row in status["plugins"]:
                row["calls"], row["seconds"] = {}, 0
        assert before == after


class TestTensorParallel:
    def test_two_ranks_schedule_alike(self, started, expected, monkeypatch) -> None:
        """Each rank has a scheduler of its own; a quota that moves while they run moves on both at once, and neither
        waits for the other for ever."""
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")

        with started(Engine, plugin="chunkllm", tp_size=2) as engine:
            TestQuota().test_whatever_happens_while_it_serves(engine, expected)
            status = engine.chunkllm.status()

        assert 2 == status["ranks"]
        assert [0, 1] == [worker["rank"] for worker in status["workers"]]
        assert 1 == len({worker["fingerprint"] for worker in status["workers"]})


class TestPool:
    def test_the_ratio_makes_the_pool(self, started) -> None:
        """`kv_cache.memory_ratio` at start decides how many blocks there are, to the block."""
        block_bytes = PAGE * 2 * 2 * 2 * 32 * 4  # tokens, layers, K and V, heads, head size, bytes
        share = (60 + 0.5) * block_bytes / info.launch_info().device_memory
        sets = {"kv_cache.memory_ratio": share}

        with started(Engine, plugin="chunkllm", plugin_set=sets, max_total_tokens=None) as engine:
            kv = engine.chunkllm.status()["kv"]

        assert (block_bytes, 59, 59) == (kv["block_bytes"], kv["total"], kv["limit"])

    @pytest.mark.parametrize(
        ("sets", "parts"),
        [
            (["kv_cache.max_layer_bytes=512KiB"], ["max_layer_bytes", "2 of 2 layers", "memory_ratio =", "would fit"]),
            (["kv_cache.memory_ratio=0.1", "plugins.hungry.memory_ratio=0.9"], ["weights", "hungry", "more than all"]),
        ],
        ids=["layers", "shares"],
    )
    def test_a_pool_that_breaks_the_spec(self, started, install, monkeypatch, sets, parts) -> None:
        """Refused in the scheduler before it is allocated; who started the engine hears the reasons, and no process
        stays behind."""
        folder = install("hungry", plugin_source("hungry", "return None"))
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")

        with pytest.raises(IncompatibleError) as refusal, started(Engine, plugin="chunkllm", plugin_set=sets):
            pass

        for part in parts:
            assert part in str(refusal.value)


def test_a_scheduler_without_the_bridge_is_not_served(started) -> None:
    """SGLang would go on without a plugin that is not loaded in a process. Who started the engine hears which one, no
    process stays behind, and nothing is waited for when what is left is collected."""

    class HalfHooked(Engine):
        run_scheduler_process_func = staticmethod(bare.run_scheduler_process)

    with (
        pytest.raises(IncompatibleError, match="scheduler 0: it runs without the bridge"),
        started(HalfHooked, plugin="chunkllm"),
    ):
        pass

    gc.collect()
    assert [] == multiprocessing.active_children()


class TestBadPlugins:
    def test_no_request_pays(self, started, expected, install, monkeypatch) -> None:
        """Plugins that raise, answer nonsense, or are late cost those calls: the texts are the stock engine's, every
        failure is counted, and after twenty they are not asked again (DESIGN, rule 1)."""
        plans = {
            "raises": ("raise RuntimeError('the sky fell')", "exception"),
            "nonsense": ("return 'as you like'", "malformed"),
            "late": ("import time; time.sleep(0.008)", "deadline"),
        }
        folders = [install(name, plugin_source(name, plan)) for name, (plan, _) in plans.items()]
        monkeypatch.setenv("PYTHONPATH", ":".join([*map(str, folders), os.environ.get("PYTHONPATH", "")]))
        sets = [f"plugins.{name}.priority=99" for name in plans]

        with started(Engine, plugin="chunkllm", plugin_set=sets) as engine:
            assert expected == answers(engine)
            status = engine.chunkllm.status()

        for name, (_, kind) in plans.items():
            bad = plugin(status, name)
            assert ("tripped", {kind: 20}) == (bad["state"], bad["failures"])
        assert (status["kv"]["total"], 0) == (status["kv"]["limit"], status["kv"]["denied"])
        assert "active" == plugin(status, "paged_kv")["state"]


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"plugin": "medusa"}, IncompatibleError, "called 'chunkllm'"),
        ({"plugin_set": ["kv_cache.memory_ratio=0.1"]}, IncompatibleError, "need plugin='chunkllm'"),
        ({"plugin": "chunkllm", "plugin_set": {"plugin": {"priorty": 3}}}, ConfigError, "plugin.priority?"),
        ({"plugin": "chunkllm", "plugin_config": "/no/such.toml"}, ConfigError, "/no/such.toml"),
    ],
)
def test_mistakes_come_before_the_model(options, kind, reason) -> None:
    """Raised as an exception with the reason, and no model was looked for."""
    with pytest.raises(kind, match=reason.replace("?", r"\?")):
        Engine(model_path="/there/is/no/such/model", **options)
