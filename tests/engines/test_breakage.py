"""What people, plugins and a dying engine can do to the bridge in vLLM, and what must not come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chunkllm_bridge.common.control import Status
from chunkllm_bridge.common.errors import ConfigError, ControlError
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.vllm import attach, blocks, control, launch


class Core:
    """A client of EngineCore, as far as the line to it goes."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.core_engines = [b"0"]
        self.does = does
        self.calls = 0

    async def call_utility_all_async(self, method: str, message: Mapping[str, Any]) -> list[Any]:
        self.calls += 1
        return [await self.does()]


async def never() -> Any:
    await asyncio.Event().wait()


class TestAnEngineThatEnds:
    def test_a_command_under_way_is_answered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM never completes such a call, and its HTTP server does not stop before its requests have: it hung."""
        monkeypatch.setattr(control, "PATIENCE", 0.01)
        core = Core(never)

        async def end() -> None:
            sending = asyncio.ensure_future(control.Line(SimpleNamespace(engine_core=core)).send(Status()))
            await asyncio.sleep(0.03)
            assert not sending.done()
            core.resources.engine_dead = True
            with pytest.raises(ControlError, match="ended") as caught:
                await asyncio.wait_for(sending, 5)
            assert 503 == caught.value.status

        asyncio.run(end())

    def test_its_plugins_are_closed(self) -> None:
        """`close()` is promised at the end; EngineCore's own shutdown is the end, and happens whatever we do."""
        events: list[str] = []
        core = type("Core", (), {"shutdown": lambda self: events.append("engine")})()
        attachment = object.__new__(attach.CoreAttachment)
        attachment._undo = attach.contextlib.ExitStack()
        attachment._undo.callback(attach.patches.SHUTDOWN.apply_to(core, attach.closing(attachment)))
        attachment._undo.callback(lambda: events.append("plugins") or 1 / 0)
        core.shutdown()
        core.shutdown()

        assert ["plugins", "engine", "engine"] == events
        assert "shutdown" not in vars(core)


class TestYaml:
    """vLLM's own `--config FILE.yaml`, which becomes flags."""

    def parse(self, tmp_path: Path, text: str) -> Spec:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        launch.register()
        (tmp_path / "serve.yaml").write_text(text)
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--config", str(tmp_path / "serve.yaml")])
        launch.take_flags(args)
        self.strict = args.additional_config["chunkllm"]["strict"]
        return Spec.from_wire(args.additional_config["chunkllm"]["spec"])

    @pytest.mark.parametrize("plugin", ["plugin: chunkllm", "plugin: [chunkllm]"])
    def test_a_table_of_parameters(self, tmp_path: Path, plugin: str) -> None:
        """Flat or nested, as many as there are; `off` is false there."""
        sets = "plugin-set: {plugin.priority: 33, plugin: {error_rate: 0.3, batch_window: 10ms}}"
        spec = self.parse(tmp_path, f"{plugin}\n{sets}\nplugin-strict: off\n")

        assert (33, 0.3, 0.01) == tuple(spec[f"plugin.{key}"] for key in ("priority", "error_rate", "batch_window"))
        assert not self.strict

    def test_a_list_is_never_taken_for_the_model(self, tmp_path: Path) -> None:
        """vLLM makes one flag of it and stray words, and the first stray word is the model."""
        with pytest.raises(ConfigError, match="taken for the model"):
            self.parse(tmp_path, "plugin: chunkllm\nplugin-set: [plugin.priority=33, plugin.error_rate=0.3]\n")


def test_a_large_pool_is_not_walked_at_every_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics ask every second, and the engine waits meanwhile."""
    walks = 0

    class Blocks(list[Any]):
        def __iter__(self) -> Any:
            nonlocal walks
            walks += 1
            return super().__iter__()

    free = SimpleNamespace(ref_cnt=0, block_hash=None)
    kept = SimpleNamespace(ref_cnt=0, block_hash=b"x")
    bridge = object.__new__(blocks.SchedulerBridge)
    bridge.total, bridge._cached, bridge._count_again = 3 + blocks.LARGE, 0, 0.0
    bridge.pool = SimpleNamespace(blocks=Blocks([free] * blocks.LARGE + [kept] * 3))
    bridge._engine_free = lambda: bridge.total
    first, second = bridge.counts(), bridge.counts()
    bridge._engine_free = lambda: 2

    assert (1, 3, first) == (walks, first.cached, second)
    assert bridge.counts().conserved  # also while the count of the cached is an old one
    monkeypatch.setattr(blocks, "LARGE", 10**9)
    bridge._count_again = 0.0
    bridge.counts(), bridge.counts()
    assert 3 == walks
