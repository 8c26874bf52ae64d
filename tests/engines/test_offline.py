"""vLLM's offline class with a model, in this process: the bridge on it, off it, and with plugins that misbehave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm import envs

from chunkllm_bridge.common.errors import ConfigError, ControlError, IncompatibleError
from chunkllm_bridge.vllm import LLM, launch
from tests.engines.conftest import plugin_source

BLOCKS = 60
PROMPTS = ["Hello", "The capital of France is", "aaaa", "x = [1, 2, 3]", "Once upon a time", "Grüße aus Berlin"]
NOWHERE = "/there/is/no/such/model"


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine runs here, and leaves this process as it was: no threads bound, no variable kept, nothing wrapped."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny, and other tests may run beside
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setattr("vllm.plugins.plugins_loaded", False)  # so that vLLM finds us as in a fresh process
    yield
    launch.unregister()
    envs.disable_envs_cache()
    torch.set_num_threads(threads)
    assert cores == os.sched_getaffinity(0)


@pytest.fixture(scope="module")
def started(tiny_model: Path) -> Callable[..., Any]:
    """Starts an engine of a class (stock or ours) as a context; a second one in this process takes a second or two."""

    @contextlib.contextmanager
    def start(cls: type, **options: Any) -> Iterator[Any]:
        llm = cls(
            str(tiny_model),
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=512,
            max_num_seqs=8,
            num_gpu_blocks_override=BLOCKS + 1,
            **options,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()

    return start


_texts: list[list[int]] = []


@pytest.fixture
def expected(started) -> list[list[int]]:
    """What the stock engine says, asked once."""
    if not _texts:
        with started(vllm.LLM) as llm:
            assert not hasattr(core(llm), "chunkllm")
            _texts.extend(answers(llm))
    return _texts


def answers(llm: Any) -> list[list[int]]:
    sampling = vllm.SamplingParams(max_tokens=100, temperature=0)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def plugin(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in status["plugins"] if row["name"] == name)


def ratio(status: dict[str, Any], blocks: int) -> float:
    """The `kv_cache.memory_ratio` that lets requests hold so many blocks."""
    kv = status["kv"]
    return float((blocks + 0.5) / (kv["total"] + 1) * kv["memory_ratio_max"])


class TestQuota:
    def test_same_tokens_under_a_quota(self, started, expected) -> None:
        """Six prompts that want 24 blocks get exactly the stock engine's tokens while they may hold 9, then 4, then all
        of them; nothing is held in the end, and the plugin is seen at work (embedl/flash-head)."""
        with started(LLM, plugin="chunkllm") as llm:
            for blocks in (9, 4, 60):
                before = llm.chunkllm.status()
                llm.chunkllm.set({"kv_cache.memory_ratio": ratio(before, blocks)})

                assert expected == answers(llm)

                status = llm.chunkllm.status()
                assert blocks == status["kv"]["limit"]
                assert 0 < status["kv"]["peak"] <= blocks
                assert (0, 0, True) == tuple(status["kv"][key] for key in ("held", "violations", "conserved"))
                assert "active" == plugin(status, "paged_kv")["state"]
                steps = status["kv"]["steps"] - before["kv"]["steps"]
                calls = [plugin(it, "paged_kv")["calls"]["plan_blocks"] for it in (before, status)]
                assert steps >= 100
                assert calls[1] >= steps  # a new generation counts from zero
                assert status["in_step"]
                assert ["worker"] == [worker["role"] for worker in status["workers"]]

    def test_no_window_is_waited_for(self, started, expected) -> None:
        """In-process nothing can arrive while a request is held, so a batch window holds nothing."""
        with started(LLM, plugin="chunkllm", plugin_set=["plugin.batch_window=50ms"]) as llm:
            assert expected == answers(llm)
            assert 0 == llm.chunkllm.status()["kv"]["window_holds"]

    def test_a_refused_change_leaves_everything_as_it_was(self, started) -> None:
        """Unknown keys, values out of range, what is fixed at start, more than the pool has: refused with the reason,
        and the same config, generation and limit stand."""
        with started(LLM, plugin="chunkllm", plugin_set={"plugin": {"priority": 7}}) as llm:
            before = llm.chunkllm.config(), llm.chunkllm.status()

            for values, status, reason in (
                ({"kv_cache.memory_ratoi": 0.1}, 422, "kv_cache.memory_ratio"),
                ({"kv_cache.memory_ratio": 2}, 422, "memory_ratio = 2"),
                ({"plugin.priority": 1, "kv_cache.max_layer_bytes": 1}, 422, "cannot change while serving"),
                ({"kv_cache.memory_ratio": 0.3}, 409, f"{BLOCKS} blocks"),
                ({"plugins.medusa.priority": 3}, 422, "medusa"),
            ):
                with pytest.raises(ControlError, match=reason) as refusal:
                    llm.chunkllm.set(values)
                assert status == refusal.value.status

            assert before == (llm.chunkllm.config(), llm.chunkllm.status())

    def test_close_gives_everything_back(self, started, expected) -> None:
        """After `close` the engine has the very functions of its own, and answers as before; control says so."""
        with started(LLM, plugin="chunkllm") as llm:
            llm.chunkllm.set({"kv_cache.memory_ratio": ratio(llm.chunkllm.status(), 3)})
            answers(llm)
            engine = core(llm)
            manager = engine.scheduler.kv_cache_manager

            engine.chunkllm.close()

            for owner, names in (
                (engine, ("chunkllm", "chunkllm_control")),
                (engine.scheduler, ("schedule", "add_request")),
                (manager, ("allocate_slots",)),
                (manager.block_pool, ("get_num_free_blocks",)),
                (engine.model_executor, ("determine_available_memory", "initialize_from_config")),
                (engine.vllm_config.scheduler_config, ("get_scheduler_cls",)),
            ):
                assert not set(names) & vars(owner).keys()
            assert expected == answers(llm)
            with pytest.raises(ControlError, match="not attached"):
                llm.chunkllm.status()


class TestEntrances:
    def test_the_stock_class_with_a_wish_in_its_config(self, started, expected) -> None:
        """`vllm.LLM(additional_config={"chunkllm": {...}})` attaches as well: there is no way in on which the plugin is
        registered and asleep (embedl/flash-head)."""
        with started(vllm.LLM, additional_config={"chunkllm": {"plugin": {"priority": 7}}}) as llm:
            assert expected == answers(llm)
            reply = core(llm).chunkllm_control({"command": "status"})

            assert ("active", 7) == tuple(plugin(reply["data"], "paged_kv")[key] for key in ("state", "priority"))

    def test_ours_without_a_plugin_is_the_stock_one(self, started, expected) -> None:
        """`chunkllm_bridge.vllm.LLM` without `plugin=` attaches nothing."""
        with started(LLM) as llm:
            assert not hasattr(llm, "chunkllm")
            assert not hasattr(core(llm), "chunkllm")
            assert expected == answers(llm)

    def test_the_ratio_makes_the_pool(self, tiny_model: Path) -> None:
        """`kv_cache.memory_ratio` at start decides how many blocks there are, to the block."""
        blocks = 40
        block_bytes = 32 * 2 * 2 * 2 * 32 * 4  # tokens, layers, K and V, heads, head size, bytes
        share = (blocks + 0.5) * block_bytes / launch_memory()
        llm = LLM(
            str(tiny_model),
            plugin="chunkllm",
            plugin_set={"kv_cache.memory_ratio": share},
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=512,
        )
        kv = llm.chunkllm.status()["kv"]
        llm.llm_engine.engine_core.shutdown()

        assert (block_bytes, blocks - 1, blocks - 1) == (kv["block_bytes"], kv["total"], kv["limit"])

    @pytest.mark.parametrize(
        ("options", "kind", "reason"),
        [
            ({"plugin": "medusa"}, IncompatibleError, "called 'chunkllm'"),
            ({"plugin_set": ["kv_cache.memory_ratio=0.1"]}, IncompatibleError, "need plugin='chunkllm'"),
            ({"plugin_config": "chunkllm.toml"}, IncompatibleError, "need plugin='chunkllm'"),
            ({"plugin": "chunkllm", "plugin_set": {"plugin": {"priorty": 3}}}, ConfigError, "plugin.priority?"),
            ({"plugin": "chunkllm", "plugin_config": "/no/such.toml"}, ConfigError, "/no/such.toml"),
        ],
    )
    def test_mistakes_come_before_the_model(self, options, kind, reason) -> None:
        """Raised as an exception with the reason, and no model was looked for."""
        with pytest.raises(kind, match=reason.replace("?", r"\?")):
            LLM(NOWHERE, **options)

    def test_a_list_of_plugins_without_our_name(self, monkeypatch) -> None:
        """VLLM_PLUGINS would keep us out of the engine's processes: said at once, with what to do."""
        monkeypatch.setenv("VLLM_PLUGINS", "theirs")

        with pytest.raises(IncompatibleError, match="VLLM_PLUGINS=theirs does not name chunkllm"):
            LLM(NOWHERE, plugin="chunkllm")

    @pytest.mark.parametrize(
        ("sets", "parts"),
        [
            (["kv_cache.max_layer_bytes=512KiB"], ["max_layer_bytes", "2 of 2 layers", "memory_ratio =", "would fit"]),
            (["kv_cache.memory_ratio=0.00001"], ["memory_ratio = 1e-05", "num-gpu-blocks-override"]),
        ],
    )
    def test_a_pool_that_breaks_the_spec(self, started, sets, parts) -> None:
        """Refused before it is allocated, with layers, bytes and the ratio that would fit."""
        with pytest.raises(IncompatibleError) as refusal, started(LLM, plugin="chunkllm", plugin_set=sets):
            pass

        for part in parts:
            assert part in str(refusal.value)

    def test_shares_that_do_not_fit_beside_the_weights(self, started, install) -> None:
        """The pool, a plugin's share and the weights together are more than the device has: the sum is spelled out."""
        install("hungry", plugin_source("hungry", "return None"))
        sets = ["kv_cache.memory_ratio=0.1", "plugins.hungry.memory_ratio=0.9"]

        words = r"weights .* kv_cache.memory_ratio 0.10 .*hungry.* 0.90 = 1.00"
        with pytest.raises(IncompatibleError, match=words), started(LLM, plugin="chunkllm", plugin_set=sets):
            pass


class TestBadPlugins:
    @pytest.mark.parametrize(
        ("plan", "kind", "words"),
        [
            ("raise RuntimeError('the sky fell')", "exception", "the sky fell"),
            ("raise SystemExit(3)", "exception", "SystemExit: 3"),
            ("return 'as you like'", "malformed", "answered str"),
            ("import time; time.sleep(0.008)", "deadline", "ms of 5.0 ms"),
        ],
        ids=["raises", "exits", "nonsense", "late"],
    )
    def test_no_request_pays(self, started, expected, install, plan, kind, words) -> None:
        """A plugin that fails in every call costs those calls: the texts are the stock engine's, every failure is
        counted, and after twenty it is not asked again (DESIGN, rule 1)."""
        install("bad", plugin_source("bad", plan))

        with started(LLM, plugin="chunkllm", plugin_set=["plugins.bad.priority=99"]) as llm:
            assert expected == answers(llm)
            status = llm.chunkllm.status()

        bad = plugin(status, "bad")
        assert ("tripped", {kind: 20}) == (bad["state"], bad["failures"])
        assert words in bad["last_failure"]
        assert 20 == bad["calls"]["plan_blocks"]
        assert (status["kv"]["total"], 0) == (status["kv"]["limit"], status["kv"]["denied"])
        assert "active" == plugin(status, "paged_kv")["state"]

    def test_an_absurd_limit_holds(self, started, expected, install) -> None:
        """A plan for no block at all is a plan: one request at a time, and all of them finish."""
        install("zero", plugin_source("zero", "return BlocksPlan(limit=0)"))

        with started(LLM, plugin="chunkllm", plugin_set=["plugins.zero.priority=1"]) as llm:
            assert expected == answers(llm)
            kv = llm.chunkllm.status()["kv"]

        assert (1, 0, 0) == (kv["limit"], kv["violations"], kv["held"])
        assert 0 < kv["overdrafts"]

    def test_one_that_cannot_be_built(self, started, expected, install) -> None:
        """An exception in the constructor stops the launch with the plugin's own words; the next engine is fine."""
        constructor = "\n    def __init__(self, config):\n        raise OSError('no disk')\n"
        install("bad", plugin_source("bad", "return None") + constructor)

        with (
            pytest.raises(IncompatibleError, match="no disk"),
            started(LLM, plugin="chunkllm", plugin_set=["plugins.bad.priority=1"]),
        ):
            pass
        with started(LLM, plugin="chunkllm") as llm:
            assert expected == answers(llm)


def launch_memory() -> int:
    from chunkllm_bridge.vllm import info

    return info.launch_info().device_memory
