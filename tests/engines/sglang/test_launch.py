"""From SGLang's own argument parser to the moment before it spawns, without a model."""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints.engine import Engine as SglangEngine
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from chunkllm_bridge.common.errors import ConfigError, IncompatibleError
from chunkllm_bridge.common.launching import Wish
from chunkllm_bridge.common.passport import Passport
from chunkllm_bridge.patches import sglang as patches
from chunkllm_bridge.sglang import Engine, control, doctor, info, launch, obstacles, refusal
from chunkllm_bridge.sglang.transport import ATTRIBUTE, passport_of
from tests.engines.conftest import plugin_source

WRAPPED = (
    *((ServerArgs, name) for name in ("add_cli_args", "from_cli_args")),
    (SglangEngine, "_launch_subprocesses"),
    *((Scheduler, name) for name in ("init_target_memory_pool", "get_init_info")),
    (DataParallelController, "get_init_info"),
)
NOWHERE = "/there/is/no/such/model"


def functions() -> list[object]:
    """What stands on SGLang's classes where we may wrap."""
    return [vars(owner)[name] for owner, name in WRAPPED]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bridge as SGLang's plugin loader leaves it in a fresh process, and SGLang's own functions afterwards."""
    for name in (launch.CONFIG, refusal.VARIABLE, "SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_RUST_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "_armed", False)
    monkeypatch.setattr(refusal, "leave", lambda: sys.exit(2))
    launch.unregister()
    stock = functions()
    launch.register()
    yield
    launch.unregister()
    assert stock == functions()


def parse(*flags: str, model: str = NOWHERE) -> argparse.Namespace:
    """As `prepare_server_args`, SGLang's own configuration file included."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    words = ["--model-path", model, *flags]
    if "--config" in words:
        words = ConfigArgumentMerger(parser).merge_config_with_args(words)
    return parser.parse_args(words)


def from_cli(*flags: str) -> Any:
    return ServerArgs.from_cli_args(parse(*flags))


def bridged(*sets: str) -> list[str]:
    return ["--plugin", "chunkllm", *(word for item in sets for word in ("--plugin-set", item))]


def passport(server_args: Any) -> Passport:
    found = passport_of(server_args)
    assert found is not None
    return found


class TestFlags:
    def test_help_shows_our_options_in_a_group(self) -> None:
        """`python -m sglang.launch_server --help` lists our group and the flags in it."""
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        said = parser.format_help()

        for part in ("ChunkLLM Bridge", "--plugin NAME", "--plugin-config FILE", "--plugin-set KEY=VALUE"):
            assert part in said

    def test_without_the_flag_nothing_is_touched(self) -> None:
        """Installed but not asked for: no attribute of ours, no variable, and the launch goes straight through."""
        before = dict(os.environ)
        server_args = from_cli()

        assert not [name for name in vars(server_args) if "chunkllm" in name]
        assert before == dict(os.environ)
        assert launch.boarding(server_args) is None
        assert not any(patch.applied() for patch in (patches.INIT_POOL, patches.INIT_INFO, patches.DP_INIT_INFO))

    def test_with_the_flag_the_passport_travels(self) -> None:
        """It survives pickling into spawned children, and copies."""
        server_args = from_cli(*bridged("kv_cache.memory_ratio=0.1"))

        for other in (server_args, pickle.loads(pickle.dumps(server_args)), copy.deepcopy(server_args)):
            assert 0.1 == passport(other).spec["kv_cache.memory_ratio"]
            assert passport(server_args) == passport(other)

    @pytest.mark.parametrize(
        "text",
        [
            "plugin: chunkllm\nplugin-set: kv_cache.memory_ratio=0.2\nplugin-strict: off\n",
            "plugin: [chunkllm]\nplugin-set: {kv_cache: {memory_ratio: 0.2}}\nplugin-strict: 'off'\n",
        ],
    )
    def test_from_a_config_file_of_sglang(self, tmp_path: Path, text: str) -> None:
        """SGLang's own `--config file.yaml` takes our flags like any other; settings are one, or a table."""
        file = tmp_path / "serve.yaml"
        file.write_text(text)
        found = passport(from_cli("--config", str(file)))

        assert 0.2 == found.spec["kv_cache.memory_ratio"]
        assert not found.strict

    def test_the_launch_line_beats_the_file(self, tmp_path: Path) -> None:
        """`--plugin-set` over the spec file."""
        file = tmp_path / "chunkllm.toml"
        file.write_text("kv_cache.memory_ratio = 0.3\nplugin.priority = 7\n")
        spec = passport(from_cli(*bridged("kv_cache.memory_ratio=0.1"), "--plugin-config", str(file))).spec

        assert (0.1, 7) == (spec["kv_cache.memory_ratio"], spec["plugin.priority"])


class TestRefusals:
    @pytest.fixture
    def refuse(self, capsys) -> Callable[..., str]:
        """What a launch with these flags says before it ends; its model does not exist, so none was looked for."""

        def refuse(*flags: str) -> str:
            args = parse(*flags)
            with pytest.raises(SystemExit) as stop:
                ServerArgs.from_cli_args(args)
            assert 2 == stop.value.code
            return str(capsys.readouterr().err)

        return refuse

    def test_all_mistakes_at_once(self, refuse, tmp_path: Path) -> None:
        """A wrong spec ends the launch with exit code 2 and every mistake, its place and the nearest right key."""
        file = tmp_path / "chunkllm.toml"
        file.write_text("kv_cache.memory_ratio = 1.5\n[plugin]\nbatch_windw = '10ms'\n")

        said = refuse(*bridged("plugin.priority=100"), "--plugin-config", str(file))

        assert "3 mistakes" in said
        for part in ("chunkllm.toml:1", "chunkllm.toml:3", "plugin.batch_window?", "plugin.priority = 100"):
            assert part in said

    def test_an_unknown_plugin_flag(self, refuse) -> None:
        """`--plugin medusa` is answered with what the flag takes and where a plugin's name goes."""
        assert "--plugin takes chunkllm" in refuse("--plugin", "medusa")

    @pytest.mark.parametrize("flag", ["--plugin-set", "--plugin-config"])
    def test_settings_without_the_flag(self, refuse, flag) -> None:
        """Settings that nobody would read are no silence but a mistake."""
        assert f"{flag} without --plugin chunkllm" in refuse(flag, "kv_cache.memory_ratio=0.1")

    def test_a_missing_spec_file(self, refuse) -> None:
        """Named, with what the system says."""
        assert "/no/such/spec.toml" in refuse("--plugin", "chunkllm", "--plugin-config", "/no/such/spec.toml")

    def test_a_broken_plugin_and_options_that_do_not_fit(self, refuse, install) -> None:
        """A plugin for another ABI, and every option that the bridge does not work with, with its reason."""
        install("older", plugin_source("older", "return None").replace("abi=(1, 0)", "abi=(0, 9)"))
        options = ("--pp-size", "2", "--tokenizer-worker-num", "2", "--enable-dp-attention", "--grpc-mode")
        said = refuse(*bridged("plugins.older.priority=3"), *options)

        assert "older 1.0: built for ABI 0.9, this bridge speaks 1.2" in said
        for part in ("--pp-size 2", "--tokenizer-worker-num 2", "--enable-dp-attention is", "--grpc-mode is"):
            assert part in said

    def test_the_options_are_sglangs(self) -> None:
        """Each option that we look at is a field of `ServerArgs`, with the default with which the bridge works."""
        stock = from_cli()

        assert {field: fits for field, (fits, _) in obstacles.UNFIT.items()} == {
            field: getattr(stock, field) for field in obstacles.UNFIT
        }

    def test_a_changed_engine(self, refuse, monkeypatch) -> None:
        """A symbol whose source is not the one that was read stops a strict launch; `--plugin-strict off` starts."""
        other = attrs.evolve(patches.DISPATCH, fingerprints=("000000000000",))
        monkeypatch.setattr(info, "PATCHES", (*patches.PATCHES, other))

        assert f"{other.target} changed" in refuse("--plugin", "chunkllm")
        assert passport_of(from_cli("--plugin", "chunkllm", "--plugin-strict", "off")) is not None

    def test_a_lost_engine_symbol(self, refuse, monkeypatch) -> None:
        """One that is gone stops every launch, strict or not."""
        lost = attrs.evolve(patches.DISPATCH, target=patches.DISPATCH.target.replace("_dispatch", "_send"))
        monkeypatch.setattr(info, "PATCHES", (*patches.PATCHES, lost))

        assert f"{lost.target} is missing" in refuse("--plugin", "chunkllm", "--plugin-strict", "off")


class TestRegister:
    def test_three_times_wraps_once(self) -> None:
        """SGLang's loader runs in every process; others may call us too."""
        once = functions()
        launch.register()
        launch.register()

        assert once == functions()

    def test_unregister_gives_the_very_functions_back(self) -> None:
        """Also those that a launch had wrapped since."""
        ours = functions()
        launch.ensure_launch_patched()
        launch.unregister()
        launch.unregister()

        assert not set(ours[:3]) & set(functions())
        assert not any(patch.applied() for patch in patches.PATCHES)

    @pytest.mark.parametrize("value", [None, "", "0", "yes"])
    def test_schedulers_are_wrapped_in_children_only(self, monkeypatch, value) -> None:
        """And only in children of a launch with the flag."""
        launch.unregister()
        if value is not None:
            monkeypatch.setenv(launch.ACTIVE, value)
        launch.register()

        assert not patches.INIT_POOL.applied()
        assert patches.LAUNCH.applied()

    def test_a_child_attaches(self, monkeypatch) -> None:
        """Scheduler and data-parallel controller are wrapped, the launcher's functions are not."""
        launch.unregister()
        monkeypatch.setenv(launch.ACTIVE, "1")
        launch.register()

        assert [False, True, True, True] == [
            patch.applied() for patch in (patches.LAUNCH, patches.INIT_POOL, patches.INIT_INFO, patches.DP_INIT_INFO)
        ]

    def test_a_child_that_cannot_attach_ends(self, monkeypatch, capsys) -> None:
        """SGLang would log an exception of a plugin and serve without it."""
        launch.unregister()
        monkeypatch.setenv(launch.ACTIVE, "1")
        gone = attrs.evolve(patches.INIT_POOL, target="sglang.srt.moved:Away")
        monkeypatch.setattr(patches, "INIT_POOL", gone)

        with pytest.raises(SystemExit) as stop:
            launch.register()

        assert 2 == stop.value.code
        assert "sglang.srt.moved" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["ADD_CLI_ARGS", "FROM_CLI_ARGS"])
    def test_an_engine_that_moved_on_still_starts(self, monkeypatch, capsys, name) -> None:
        """A symbol that this SGLang lacks does not end its commands: one line says why, and nothing stays half
        wrapped."""
        launch.unregister()
        stock = functions()
        monkeypatch.setattr(patches, name, attrs.evolve(getattr(patches, name), target="sglang.srt.moved:Away"))

        launch.register()

        assert "chunkllm: not loaded" in capsys.readouterr().err
        assert stock == functions()

    def test_the_entry_point(self) -> None:
        """What SGLang loads in every process."""
        point = next(point for point in entry_points(group="sglang.srt.plugins") if point.name == "chunkllm")

        assert launch.register is point.load()


class TestLaunch:
    """`launch.launch` around a start that is not SGLang's."""

    @pytest.fixture
    def server_args(self) -> Any:
        return from_cli(*bridged())

    def test_children_learn_that_they_attach(self, server_args) -> None:
        """For as long as they are spawned; a later engine of the same program starts as if there had been none."""

        def start() -> Any:
            assert "1" == os.environ[launch.ACTIVE]
            assert refusal.VARIABLE in os.environ
            raise KeyError("stop")

        with pytest.raises(KeyError):
            launch.launch(start, server_args, passport(server_args))

        assert launch.ACTIVE not in os.environ
        assert refusal.VARIABLE not in os.environ

    def test_a_scheduler_that_refuses_is_heard(self, server_args, monkeypatch) -> None:
        """Its reasons come in place of the error that SGLang makes of its end; what was started is ended."""
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=time.sleep, args=(60,))

        def start() -> Any:
            child.start()
            monkeypatch.setattr(os, "getppid", os.getpid)
            with pytest.raises(SystemExit), refusal.refusing():
                raise IncompatibleError("the KV pool of rank 0", ["too large", "and odd"])
            with pytest.raises(SystemExit), refusal.refusing():
                raise IncompatibleError("the KV pool of rank 0", ["too large"])
            raise RuntimeError("Rank 0 scheduler died during initialization (exit code: 2)")

        with pytest.raises(IncompatibleError) as stop:
            launch.launch(start, server_args, passport(server_args))

        assert ("the KV pool of rank 0: too large", "the KV pool of rank 0: and odd") == stop.value.reasons
        child.join(10)
        assert not child.is_alive()

    def test_a_scheduler_without_the_bridge(self, server_args, monkeypatch) -> None:
        """Half hooked is not served: the launch ends with every reason, the watchdog and the children with it."""
        watchdog = types.SimpleNamespace(stop=lambda: stopped.append(True))
        stopped: list[bool] = []
        infos = [{}, {"chunkllm": {"fingerprint": "0123456789ab", "rank": 1}}]
        schedulers = types.SimpleNamespace(scheduler_infos=infos, all_child_pids=[])

        with pytest.raises(IncompatibleError) as stop:
            launch.launch(
                lambda: (types.SimpleNamespace(), None, None, schedulers, watchdog, []),
                server_args,
                passport(server_args),
            )

        assert [True] == stopped
        assert "scheduler 0: it runs without the bridge" in str(stop.value)
        assert "rank 1 has fingerprint 0123456789ab" in str(stop.value)

    def test_on_a_command_line_it_is_a_message(self, capsys) -> None:
        """And exit code 2, no traceback."""
        server_args = from_cli(*bridged())
        monkey = vars(server_args)
        monkey[ATTRIBUTE] = {**monkey[ATTRIBUTE], "fingerprint": "0123456789ab"}

        with pytest.raises(SystemExit) as stop:
            SglangEngine._launch_subprocesses(server_args, None, None, None)

        assert 2 == stop.value.code
        assert "fingerprint" in capsys.readouterr().err

    def test_a_controller_speaks_for_its_replicas(self) -> None:
        """Each of their reports is looked at."""
        found = passport(from_cli(*bridged()))
        good = {"fingerprint": found.fingerprint, "rank": 0}
        controller = types.SimpleNamespace(_scheduler_init_infos=[{"chunkllm": good}, {}])
        told = launch.wrap_dp_init_info(lambda controller: {"status": "ready"})(controller)

        assert {"status": "ready", "chunkllm": [good, None]} == told
        assert 1 == len(control.strangers([told], found))


class TestPython:
    class Recorded(Engine):
        """Our engine, up to the moment before it spawns."""

        @classmethod
        def _launch_subprocesses(cls, server_args: Any, *args: Any, **kwargs: Any) -> Any:
            raise KeyError(passport_of(server_args))

    @pytest.fixture(autouse=True)
    def no_exit_handler(self, monkeypatch) -> None:
        """SGLang's ends every child of this process at its end."""
        monkeypatch.setattr("atexit.register", lambda *args: None)

    @pytest.mark.parametrize("given", [["kv_cache.memory_ratio=0.1"], {"kv_cache": {"memory_ratio": 0.1}}])
    def test_the_keywords_of_our_engine(self, given) -> None:
        """`Engine(model_path=..., plugin="chunkllm", plugin_set=...)` is the command line in Python."""
        with pytest.raises(KeyError) as stop:
            self.Recorded(model_path=NOWHERE, plugin="chunkllm", plugin_set=given)

        assert 0.1 == stop.value.args[0].spec["kv_cache.memory_ratio"]

    def test_arguments_made_before(self) -> None:
        """`server_args=` too, and the caller's own record stays as it was."""
        mine = ServerArgs(model_path=NOWHERE)
        with pytest.raises(KeyError) as stop:
            self.Recorded(server_args=mine, plugin="chunkllm")

        assert stop.value.args[0] is not None
        assert passport_of(mine) is None

    def test_without_plugin_it_is_sglangs(self) -> None:
        """No passport; settings that nobody would read are refused."""
        with pytest.raises(KeyError) as stop:
            self.Recorded(model_path=NOWHERE)
        with pytest.raises(IncompatibleError, match="plugin_set need"):
            self.Recorded(model_path=NOWHERE, plugin_set=["kv_cache.memory_ratio=0.1"])

        assert (None,) == stop.value.args

    def test_mistakes_are_raised(self, monkeypatch) -> None:
        """Before anything is spawned, with every reason."""
        with pytest.raises(ConfigError, match="memory_ratio"):
            self.Recorded(model_path=NOWHERE, plugin="chunkllm", plugin_set={"kv_cache": {"memory_ratio": 2}})
        with pytest.raises(IncompatibleError, match="the bridge is called"):
            self.Recorded(model_path=NOWHERE, plugin="medusa")
        monkeypatch.setenv("SGLANG_PLUGINS", "theirs")
        with pytest.raises(IncompatibleError, match="SGLANG_PLUGINS=theirs does not name chunkllm"):
            self.Recorded(model_path=NOWHERE, plugin="chunkllm")
        with pytest.raises(IncompatibleError, match="--pp-size 2"):
            launch.resolve(Wish(), types.SimpleNamespace(pp_size=2))

    def test_control_without_the_bridge(self) -> None:
        """Says so."""
        engine = object.__new__(Engine)
        engine.tokenizer_manager = types.SimpleNamespace()

        assert not hasattr(engine, "chunkllm")


class TestHookImport:
    @pytest.fixture
    def spec_file(self, tmp_path: Path, monkeypatch) -> Path:
        file = tmp_path / "chunkllm.toml"
        file.write_text("kv_cache.memory_ratio = 0.1\n")
        monkeypatch.setenv(launch.CONFIG, str(file))
        return file

    def test_an_armed_program(self, spec_file) -> None:
        """SGLang's own engine gets the passport when it starts its processes, and an attribute `chunkllm`."""
        launch.unregister()
        launch.arm()
        server_args = ServerArgs(model_path=NOWHERE)
        found = launch.boarding(server_args)

        assert found is not None
        assert 0.1 == found.spec["kv_cache.memory_ratio"]
        assert found == passport_of(server_args)
        assert "chunkllm" in vars(SglangEngine)
        launch.unregister()
        assert "chunkllm" not in vars(SglangEngine)

    def test_a_command_line_in_it(self, spec_file) -> None:
        """There, flags alone count."""
        launch.arm()

        assert launch.boarding(from_cli()) is None

    def test_a_launch_that_has_begun(self, spec_file, monkeypatch) -> None:
        """SGLang then loads us too late to wrap it: it is not served without the bridge, and the message says how."""
        launch.unregister()
        monkeypatch.setattr(launch, "_armed", True)
        begun: dict[str, Any] = {"__name__": launch.ENGINE, "register": launch.register}
        exec("def _launch_subprocesses():\n    register()", begun)

        with pytest.raises(SystemExit, match="before chunkllm_bridge"):
            begun["_launch_subprocesses"]()

    def test_not_armed(self, spec_file) -> None:
        """The variable does nothing where nothing imported us since it was set."""
        assert launch.boarding(ServerArgs(model_path=NOWHERE)) is None

    def test_a_bad_spec(self, spec_file) -> None:
        """Raised before anything is spawned."""
        spec_file.write_text("kv_cache.memory_ratio = 2\n")
        launch.arm()

        with pytest.raises(ConfigError, match="memory_ratio"):
            SglangEngine._launch_subprocesses(ServerArgs(model_path=NOWHERE), None, None, None)

    @pytest.mark.parametrize(("name", "value"), [("SGLANG_PLUGINS", "theirs"), ("SGLANG_PLATFORM", "theirs")])
    def test_hidden_from_sglang(self, spec_file, monkeypatch, name, value) -> None:
        """Where SGLang would never call us, the import says so."""
        monkeypatch.setenv(name, value)

        with pytest.raises(IncompatibleError, match=f"{name}={value}"):
            launch.arm()


class TestDoctor:
    def test_every_seam_is_present(self) -> None:
        """On the version that the suite runs on nothing is changed or missing, wrapped or not."""
        report = doctor.examine()

        assert [] == [seam for seam in report["seams"] if seam["status"] != "present"]
        assert report["healthy"]
        assert report["tested"]

    def test_traps_are_told(self, monkeypatch) -> None:
        """Variables that hide us or our platform, and the front end that has no plugins."""
        monkeypatch.setattr(obstacles, "this_machine", lambda: types.SimpleNamespace(device="cpu"))
        monkeypatch.setenv("SGLANG_PLUGINS", "theirs")
        monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
        said = "\n".join(doctor.notes())

        assert "SGLANG_PLUGINS=theirs does not name chunkllm" in said
        assert "chunkllm_cpu" in said
        assert "SGLANG_RUST_SERVER" in said
