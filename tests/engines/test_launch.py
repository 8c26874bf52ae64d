"""From vLLM's own argument parser to its resolved config, before any model is loaded."""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from chunkllm_bridge.common.errors import ConfigError, IncompatibleError
from chunkllm_bridge.common.launching import ACTIVE
from chunkllm_bridge.common.passport import KEY, Passport
from chunkllm_bridge.patches import vllm as patches
from chunkllm_bridge.vllm import doctor, info, launch
from chunkllm_bridge.vllm.attach import GUARD, CoreAttachment, NotAttached
from chunkllm_bridge.vllm.transport import HashedConfig, in_config
from tests.engines.conftest import plugin_source
from tests.engines.simulation import make_host

WRAPPED = (
    *((EngineArgs, name) for name in ("add_cli_args", "from_cli_args", "create_engine_config")),
    (EngineCore, "_initialize_kv_caches"),
)
NOWHERE = "/there/is/no/such/model"


class TheirScheduler(Scheduler):
    """A scheduler that the user chose."""


def functions() -> list[object]:
    """What stands on vLLM's classes where we may wrap."""
    return [vars(owner)[name] for owner, name in WRAPPED]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The bridge as vLLM's plugin loader leaves it in a fresh process, and vLLM's own functions afterwards."""
    launch.unregister()
    stock = functions()
    launch.register()
    yield
    launch.unregister()
    assert stock == functions()


@pytest.fixture
def parse() -> Callable[..., argparse.Namespace]:
    def parse(*flags: str, model: str | Path = NOWHERE) -> argparse.Namespace:
        return make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(model), *flags])

    return parse


@pytest.fixture
def resolve(parse, tiny_model: Path) -> Callable[..., Any]:
    """The `VllmConfig` of a launch with these flags."""

    def resolve(*flags: str) -> Any:
        args = parse("--dtype", "float32", *flags, model=tiny_model)
        return AsyncEngineArgs.from_cli_args(args).create_engine_config()

    return resolve


def bridged(*sets: str, more: Sequence[str] = ()) -> list[str]:
    return ["--plugin", "chunkllm", *(word for item in sets for word in ("--plugin-set", item)), *more]


def passport(config: Any) -> Passport:
    found = in_config(config)
    assert found is not None
    return found


class TestFlags:
    def test_help_shows_our_options_in_a_group(self, capsys) -> None:
        """`vllm serve --help` lists our group, and `--help="ChunkLLM Bridge"` the flags in it."""
        parser = make_arg_parser(FlexibleArgumentParser())
        assert "ChunkLLM Bridge" in parser.format_help()

        with pytest.raises(SystemExit):
            parser.parse_args(["--help=ChunkLLM Bridge"])

        said = capsys.readouterr().out
        for flag in ("--plugin NAME", "--plugin-config FILE", "--plugin-set KEY=VALUE", "--plugin-strict {on,off}"):
            assert flag in said

    def test_without_the_flag_nothing_is_touched(self, resolve) -> None:
        """Installed but not asked for: no config of ours, the engine's own scheduler, no variable, no routes."""
        before = dict(os.environ)
        config = resolve()

        assert {} == config.additional_config
        assert config.scheduler_config.scheduler_cls is None
        assert {} == {name: os.environ[name] for name in os.environ.keys() - before.keys() if "VLLM_PLUGINS" in name}
        assert ACTIVE not in os.environ
        assert not patches.INITIALIZE_KV_CACHES.applied()

    def test_with_the_flag_every_child_learns_of_it(self, resolve) -> None:
        """The spec is in the engine's config, and the environment tells children to attach and to open our routes; all
        other installed plugins stay allowed."""
        config = resolve(*bridged("kv_cache.memory_ratio=0.1"))

        assert 0.1 == passport(config).spec["kv_cache.memory_ratio"]
        assert "1" == os.environ[ACTIVE]
        allowed = os.environ["VLLM_PLUGINS"].split(",")
        assert {point.name for group in launch.GROUPS for point in entry_points(group=group)} == set(allowed)
        assert patches.INITIALIZE_KV_CACHES.applied()

    def test_a_list_of_the_users_is_left_alone(self, resolve, monkeypatch) -> None:
        """VLLM_PLUGINS is the user's word."""
        monkeypatch.setenv("VLLM_PLUGINS", "chunkllm,theirs")
        resolve(*bridged())

        assert "chunkllm,theirs" == os.environ["VLLM_PLUGINS"]

    def test_from_a_config_file_of_vllm(self, tmp_path: Path) -> None:
        """vLLM's own `--config file.yaml` takes our flags like any other."""
        file = tmp_path / "serve.yaml"
        file.write_text("plugin: chunkllm\nplugin-set: kv_cache.memory_ratio=0.2\n")
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--config", str(file), "--model", NOWHERE])
        launch.take_flags(args)

        assert 0.2 == Passport.from_wire(args.additional_config[KEY]).spec["kv_cache.memory_ratio"]

    def test_the_launch_line_beats_the_file(self, parse, tmp_path: Path) -> None:
        """`--plugin-set` over the spec file."""
        file = tmp_path / "chunkllm.toml"
        file.write_text("kv_cache.memory_ratio = 0.3\nplugin.priority = 7\n")
        args = parse(*bridged("kv_cache.memory_ratio=0.1", more=["--plugin-config", str(file)]))
        launch.take_flags(args)

        spec = Passport.from_wire(args.additional_config[KEY]).spec
        assert (0.1, 7) == (spec["kv_cache.memory_ratio"], spec["plugin.priority"])


class TestRefusals:
    @pytest.fixture
    def refuse(self, parse, capsys) -> Callable[..., str]:
        """What a launch with these flags says before it ends; its model does not exist, so none was looked for."""

        def refuse(*flags: str) -> str:
            with pytest.raises(SystemExit) as stop:
                AsyncEngineArgs.from_cli_args(parse(*flags))
            assert 2 == stop.value.code
            return str(capsys.readouterr().err)

        return refuse

    def test_all_mistakes_at_once(self, refuse, tmp_path: Path) -> None:
        """A wrong spec ends the launch with exit code 2 and every mistake, its place and the nearest right key
        (vllm#35573, vllm#40455)."""
        file = tmp_path / "chunkllm.toml"
        file.write_text("kv_cache.memory_ratio = 1.5\n[plugin]\nbatch_windw = '10ms'\n")

        said = refuse(*bridged("plugin.priority=100", "speculative.plugin=medsa", more=["--plugin-config", str(file)]))

        assert "4 mistakes" in said
        for part in ("chunkllm.toml:1", "chunkllm.toml:3", "plugin.batch_window?", "plugin.priority = 100", "medsa"):
            assert part in said

    def test_an_unknown_plugin_flag(self, refuse) -> None:
        """`--plugin medusa` is answered with what the flag takes and where a plugin's name goes."""
        said = refuse("--plugin", "medusa")

        assert "--plugin takes chunkllm" in said
        assert "[plugins.medusa]" in said

    @pytest.mark.parametrize("flag", ["--plugin-set", "--plugin-config"])
    def test_settings_without_the_flag(self, refuse, flag) -> None:
        """Settings that nobody would read are no silence but a mistake."""
        assert f"{flag} without --plugin chunkllm" in refuse(flag, "kv_cache.memory_ratio=0.1")

    def test_a_spec_given_twice(self, refuse) -> None:
        """By our flag and by vLLM's own `--additional-config`: both are named."""
        given = json.dumps({"chunkllm": {"kv_cache": {"memory_ratio": 0.1}}})
        said = refuse("--plugin", "chunkllm", "--additional-config", given)

        assert "--plugin" in said
        assert "--additional-config" in said

    def test_two_that_draft(self, refuse) -> None:
        """Speculation of vLLM's own beside that of the spec: both are named."""
        own = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
        said = refuse(*bridged("speculative.plugin=medusa"), "--speculative-config", own)

        assert "speculative.plugin = medusa and --speculative-config" in said

    def test_a_missing_spec_file(self, refuse) -> None:
        """Named, with what the system says."""
        assert "/no/such/spec.toml" in refuse("--plugin", "chunkllm", "--plugin-config", "/no/such/spec.toml")

    def test_a_state_folder_that_cannot_be_written(self, refuse, tmp_path: Path) -> None:
        """`rollback.config` is tried at start, not at the first rollback."""
        file = tmp_path / "chunkllm.toml"
        file.write_text(f"rollback.config = '{tmp_path / 'chunkllm.toml' / 'state'}'\n")

        assert "rollback.config" in refuse("--plugin", "chunkllm", "--plugin-config", str(file))

    def test_a_broken_plugin_is_named(self, refuse, install) -> None:
        """A plugin of another package that was built for another ABI stops the launch with its reason."""
        install("older", plugin_source("older", "return None").replace("abi=(1, 0)", "abi=(0, 9)"))
        said = refuse(*bridged("plugins.older.priority=3"))

        assert "older 1.0: built for ABI 0.9, this bridge speaks 1.2" in said

    def test_two_plugins_that_want_a_seam_alone(self, refuse, install) -> None:
        """Both are named (NVIDIA-NeMo/RL#4155)."""
        install("lonely", plugin_source("lonely", "return None").replace("abi=", "exclusive=True, abi="))
        said = refuse(*bridged("plugins.lonely.priority=3"))

        assert "lonely and paged_kv" in said

    def test_a_changed_engine(self, refuse, parse, monkeypatch) -> None:
        """A symbol whose source is not the one that was read stops a strict launch and is named; `--plugin-strict off`
        starts all the same (NVIDIA-NeMo/RL#4155)."""
        other = attrs.evolve(patches.SCHEDULE, fingerprints=("000000000000",))
        monkeypatch.setattr(info, "PATCHES", (*patches.PATCHES, other))

        said = refuse("--plugin", "chunkllm")
        launch.take_flags(parse("--plugin", "chunkllm", "--plugin-strict", "off"))

        assert f"{other.target} changed" in said
        assert "000000000000" in said

    def test_a_lost_engine_symbol(self, refuse, monkeypatch) -> None:
        """One that is gone stops every launch, strict or not (vllm-plugin-FL#125)."""
        lost = attrs.evolve(patches.SCHEDULE, target="vllm.v1.core.sched.scheduler:Scheduler.plan")
        monkeypatch.setattr(info, "PATCHES", (*patches.PATCHES, lost))

        assert f"{lost.target} is missing" in refuse("--plugin", "chunkllm", "--plugin-strict", "off")


class TestRegister:
    def test_three_times_wraps_once(self) -> None:
        """vLLM's loaders call a plugin from the parser, the engine and the worker (vllm#10443)."""
        once = functions()
        launch.register()
        launch.register()

        assert once == functions()
        for owner, name in WRAPPED[:3]:
            wrapper = getattr(vars(owner)[name], "__func__", vars(owner)[name])
            assert not hasattr(wrapper.__wrapped__, "__wrapped__")

    def test_unregister_gives_the_very_functions_back(self) -> None:
        """Also those that an engine in this process had wrapped since."""
        ours = functions()
        launch.ensure_core_patched()
        launch.unregister()
        launch.unregister()
        stock = functions()

        assert not set(ours[:3]) & set(stock)
        assert not any(patch.applied() for patch in patches.PATCHES)
        launch.register()

    @pytest.mark.parametrize(
        ("value", "attaches"), [(None, False), ("", False), ("0", False), ("yes", False), ("1", True)]
    )
    def test_the_switch_is_honoured(self, monkeypatch, value, attaches) -> None:
        """EngineCore is wrapped only in the children of a launch with the flag (vllm-ascend#4351)."""
        launch.unregister()
        if value is not None:
            monkeypatch.setenv(ACTIVE, value)
        launch.register()

        assert attaches is patches.INITIALIZE_KV_CACHES.applied()

    @pytest.mark.parametrize("name", ["ADD_CLI_ARGS", "FROM_CLI_ARGS", "CREATE_ENGINE_CONFIG"])
    def test_an_engine_that_moved_on_still_starts(self, monkeypatch, capsys, name) -> None:
        """A symbol that this vLLM lacks does not end its commands: one line says why, and nothing stays half wrapped
        (vllm-plugin-FL#125, #199)."""
        launch.unregister()
        stock = functions()
        gone = attrs.evolve(getattr(patches, name), target="vllm.v1.attention.backends.moved:Away")
        monkeypatch.setattr(patches, name, gone)

        launch.register()

        assert "chunkllm: not loaded" in (said := capsys.readouterr().err)
        assert "vllm.v1.attention.backends.moved" in said
        assert stock == functions()
        assert "ChunkLLM Bridge" not in make_arg_parser(FlexibleArgumentParser()).format_help()

    def test_our_module_imports_without_the_engines_parts(self) -> None:
        """The entry point that vLLM loads in every command imports nothing of vLLM before it acts."""
        point = next(point for point in entry_points(group="vllm.general_plugins") if point.name == "chunkllm")

        assert launch.register is point.load()

    def test_an_engine_without_a_version(self, monkeypatch) -> None:
        """A source build may have none: that is said, and not taken for a tested one (kvcached)."""
        monkeypatch.setitem(sys.modules, "vllm.version", types.ModuleType("vllm.version"))

        assert "unknown" == info.version()
        assert not doctor.examine()["tested"]


class TestConfig:
    def test_another_quota_is_no_other_graph(self, resolve) -> None:
        """What can be changed while serving does not enter the key of vLLM's compile cache, nor does the bridge
        itself (vllm-ascend#15188)."""
        stock = resolve()

        assert stock.compute_hash() == resolve(*bridged("kv_cache.memory_ratio=0.1")).compute_hash()
        assert stock.compute_hash() == resolve(*bridged("kv_cache.memory_ratio=0.2")).compute_hash()

    def test_what_others_keep_there_still_counts(self, resolve) -> None:
        """Another plugin's key in `additional_config` changes the hash, with whatever quota of ours (vllm#28416)."""

        def key(theirs: int, ratio: float) -> str:
            flags = bridged(f"kv_cache.memory_ratio={ratio}", more=["--additional-config", json.dumps({"ops": theirs})])
            return str(resolve(*flags).compute_hash())

        assert key(1, 0.1) == key(1, 0.2)
        assert key(1, 0.1) != key(2, 0.1)

    def test_a_later_graph_setting_counts(self) -> None:
        """What changes the compiled graph will enter the key."""
        assert HashedConfig({KEY: 1}, graph="a").compute_hash() != HashedConfig({KEY: 1}, graph="b").compute_hash()

    def test_speculation_is_launched(self, resolve) -> None:
        """`speculative.plugin` makes vLLM verify so many draft tokens; without it nothing is launched. Other slots are
        another compiled graph, and vLLM's own key says so."""
        config, stock = resolve(*bridged("speculative.plugin=medusa", "speculative.tokens=3")), resolve(*bridged())

        assert ("custom_class", 3) == (
            config.speculative_config.method,
            config.speculative_config.num_speculative_tokens,
        )
        assert (3, 3) == (lambda it: (it.draft_tokens, it.draft_nodes))(info.engine_info(config, role="core"))
        assert (None, 0) == (stock.speculative_config, info.engine_info(stock, role="core").draft_tokens)

    def test_survives_pickling(self, resolve) -> None:
        """The config reaches spawned children and remote workers by pickle, and is copied deep on the way."""
        config = resolve(*bridged("kv_cache.memory_ratio=0.1", more=["--additional-config", '{"theirs": 1}']))
        before = passport(config)

        for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
            assert before == passport(other)
            assert before.spec.rows() == passport(other).spec.rows()
            assert 1 == other.additional_config["theirs"]
            assert config.compute_hash() == other.compute_hash()

    def test_spawned_api_servers_resolve_the_same(self, parse, tiny_model: Path, tmp_path: Path) -> None:
        """They get the parsed arguments, not the command line: the same passport, though the file may be gone."""
        file = tmp_path / "chunkllm.toml"
        file.write_text("kv_cache.memory_ratio = 0.1\n")
        args = parse("--dtype", "float32", *bridged(more=["--plugin-config", str(file)]), model=tiny_model)
        first = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        file.unlink()

        args = pickle.loads(pickle.dumps(args))
        again = AsyncEngineArgs.from_cli_args(args).create_engine_config()

        assert passport(first) == passport(again)

    def test_from_python(self, tiny_model: Path) -> None:
        """`additional_config={"chunkllm": {...}}` is the same wish, nested or dotted, with or without a file."""
        wish = {"kv_cache": {"memory_ratio": 0.1}, "plugin.priority": 7}
        args = EngineArgs(model=str(tiny_model), dtype="float32", additional_config={KEY: wish, "theirs": 1})
        config = args.create_engine_config()

        spec = passport(config).spec
        assert (0.1, 7) == (spec["kv_cache.memory_ratio"], spec["plugin.priority"])
        assert 1 == config.additional_config["theirs"]
        with pytest.raises(ConfigError, match="memory_ratio"):
            EngineArgs(model=NOWHERE, additional_config={KEY: {"kv_cache": {"memory_ratio": 2}}}).create_engine_config()

    def test_the_ratio_sizes_the_pool_on_a_cpu(self, resolve) -> None:
        """vLLM would take most of the machine there; it is told the ratio's bytes, unless it was told less."""
        memory = info.launch_info().device_memory
        config = resolve(*bridged("kv_cache.memory_ratio=0.01"))
        less = resolve(*bridged("kv_cache.memory_ratio=0.01", more=["--kv-cache-memory-bytes", "1000000"]))

        assert int(0.01 * memory) == config.cache_config.kv_cache_memory_bytes
        assert 1_000_000 == less.cache_config.kv_cache_memory_bytes


class TestScheduler:
    @pytest.mark.parametrize("given", [None, f"{TheirScheduler.__module__}.{TheirScheduler.__qualname__}"])
    def test_the_users_choice_is_respected(self, resolve, given, monkeypatch) -> None:
        """`--scheduler-cls` comes through, and without it the engine chooses as it always does."""
        monkeypatch.setitem(sys.modules, TheirScheduler.__module__, sys.modules[__name__])
        stock = resolve(*(["--scheduler-cls", given] if given else []))
        config = resolve(*bridged(more=["--scheduler-cls", given] if given else ()))
        attachment = CoreAttachment(object(), passport(config))

        undo = attachment._await_scheduler(config.scheduler_config, make_host(41))
        undo()

        assert given == passport(config).engine["scheduler_cls"]
        assert stock.scheduler_config.get_scheduler_cls() is config.scheduler_config.get_scheduler_cls()

    def test_a_child_without_the_bridge_is_refused(self, resolve) -> None:
        """An EngineCore in which our plugin was not loaded cannot go on as if nothing had been asked: the scheduler
        that it finds in its config refuses, and says what to look at (vllm#18326, embedl/flash-head)."""
        config = resolve(*bridged())

        assert GUARD == config.scheduler_config.scheduler_cls
        assert NotAttached is config.scheduler_config.get_scheduler_cls()
        with pytest.raises(IncompatibleError, match="VLLM_PLUGINS"):
            config.scheduler_config.get_scheduler_cls()(vllm_config=config)


class TestFingerprint:
    def test_a_process_that_differs_is_refused(self, resolve) -> None:
        """Both fingerprints are named, and the process (vllm#18326)."""
        ours = passport(resolve(*bridged()))
        other = attrs.evolve(ours, fingerprint="0123456789ab")

        ours.verify("EngineCore process")
        with pytest.raises(IncompatibleError) as refusal:
            other.verify("EngineCore process")

        for part in ("EngineCore process", "0123456789ab", ours.fingerprint):
            assert part in str(refusal.value)

    def test_another_version_of_a_plugin(self, resolve, install) -> None:
        """A child that finds another version of a seated plugin differs; of one that has no seat, it does not."""
        install("theirs", plugin_source("theirs", "return None"))
        seated, without = passport(resolve(*bridged("plugins.theirs.priority=3"))), passport(resolve(*bridged()))
        install("theirs", plugin_source("theirs", "return None", "2.0"), "2.0")

        without.verify("worker of rank 1")
        with pytest.raises(IncompatibleError, match="worker of rank 1"):
            seated.verify("worker of rank 1")

    def test_a_child_without_the_plugin(self, resolve, install, monkeypatch) -> None:
        """A child that lacks a seated plugin, or may not name it, is told which."""
        folder = install("theirs", plugin_source("theirs", "return None"))
        seated = passport(resolve(*bridged("plugins.theirs.priority=3")))

        monkeypatch.setenv("CHUNKLLM_PLUGINS", "medusa")
        with pytest.raises(IncompatibleError, match="theirs"):
            seated.verify("EngineCore process")
        monkeypatch.delenv("CHUNKLLM_PLUGINS")
        monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(folder)])
        with pytest.raises(IncompatibleError, match="theirs"):
            seated.verify("EngineCore process")


class TestDoctor:
    def test_every_seam_is_present(self) -> None:
        """On the version that the suite runs on nothing is changed or missing, wrapped or not (vllm#26452)."""
        report = doctor.examine()

        assert [] == [seam for seam in report["seams"] if seam["status"] != "present"]
        assert report["healthy"]
        assert report["tested"]

    def test_traps_are_told(self, monkeypatch) -> None:
        """A list of the user's without our name, and the front end that has no plugins."""
        monkeypatch.setenv("VLLM_PLUGINS", "theirs")
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
        said = "\n".join(doctor.notes())

        assert "VLLM_PLUGINS=theirs does not name chunkllm" in said
        assert "VLLM_USE_RUST_FRONTEND" in said
