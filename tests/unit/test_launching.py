"""From launch flags, keyword arguments or a table to a passport, with every reason against."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import attrs
import pytest

from chunkllm_bridge import DraftsStep, Plugin, PluginSpec, Seam
from chunkllm_bridge.common.errors import ConfigError, IncompatibleError
from chunkllm_bridge.common.launching import (
    Wish,
    add_flags,
    draft_slots,
    plain_sets,
    resolve,
    stopping_on_mistakes,
    wish_of_arguments,
    wished,
    wished_by_flags,
)
from chunkllm_bridge.common.passport import Passport
from chunkllm_bridge.common.testing import FakeCatalogue, FakeEngine, spec_for
from chunkllm_bridge.common.written import Source, read_sets
from chunkllm_bridge.patches import Probe

INFO = attrs.evolve(FakeEngine().info, role="launch")


def flags(*words: str) -> Wish | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return wished_by_flags(parser.parse_args(words))


class TestFlags:
    def test_none_of_ours_is_no_wish(self) -> None:
        """Also on an engine's parser that never got them."""
        assert flags() is None
        assert wished_by_flags(argparse.Namespace()) is None

    def test_all_of_them(self) -> None:
        """Sets in their order, the file as a path; strict unless told otherwise, also as a YAML `off` tells it."""
        sets = ("--plugin-set", "a=1", "--plugin-set", "b=2")

        assert Wish() == flags("--plugin", "chunkllm")
        assert Wish(Path("x.toml"), ("a=1", "b=2")) == flags("--plugin", "chunkllm", "--plugin-config", "x.toml", *sets)
        for word in (["--plugin-strict", "off"], ["--no-plugin-strict"]):
            assert Wish(strict=False) == flags("--plugin", "chunkllm", *word)

    def test_an_unknown_plugin_flag(self) -> None:
        """Answered with what the flag takes and where a plugin's name goes."""
        with pytest.raises(ConfigError, match=r"--plugin takes chunkllm.*\[plugins.medusa\]"):
            flags("--plugin", "chunkllm", "--plugin", "medusa")

    def test_settings_without_the_flag(self) -> None:
        """Settings that nobody would read are no silence but a mistake; all of them are named."""
        with pytest.raises(IncompatibleError, match="--plugin-config and --plugin-set without --plugin chunkllm"):
            flags("--plugin-config", "x.toml", "--plugin-set", "a=1")

    def test_json_is_what_a_yaml_table_becomes(self) -> None:
        """And nothing else is taken for one."""
        assert ["a.b=1", "c=d"] == list(plain_sets([json.dumps({"a": {"b": 1}}), "c=d"]))
        assert ["[1]", "3", "{"] == list(plain_sets(["[1]", "3", "{"]))

    def test_a_mistake_is_a_message_and_an_exit_code(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Anything else is a bug and looks like one."""
        with pytest.raises(SystemExit) as stop, stopping_on_mistakes():
            flags("--plugin", "medusa")
        with pytest.raises(ZeroDivisionError), stopping_on_mistakes():
            _ = 1 / 0

        assert 2 == stop.value.code
        assert capsys.readouterr().err.startswith("chunkllm: 1 mistake in the plugin spec:")


class TestWishes:
    """What stands under our key in an engine's own config, or in `plugin_set` in Python."""

    def test_an_empty_table_seats_a_plugin(self) -> None:
        """As it does in the file."""
        assert Wish(None, ["plugins.mine={}"]) == wished({"plugins": {"mine": {}}})

    def test_every_value_arrives_as_it_was(self) -> None:
        """Also a smile, a list of tables, a text that looks like a number, and a path."""
        values = {"a": "\U0001f600", "b": [{"c": 1}], "d": "10ms", "e": "0.1", "f": True, "g": "[x"}
        written = wished({"plugins": {"mine": values}, "rollback": {"config": Path("/s")}}).sets
        read = {given.keys[-1]: given.value for given in read_sets(written, [], Source("set"))}

        assert {**values, "config": "/s"} == read

    @pytest.mark.parametrize("wish", [True, [], "on", {"plugin_config": 5}])
    def test_what_is_no_table_is_a_mistake(self, wish: object) -> None:
        """Named with the place where it stands."""
        with pytest.raises(ConfigError, match="their_config: chunkllm"):
            wished(wish, "their_config")


class TestArguments:
    def test_the_same_as_the_flags(self) -> None:
        """A list as on the command line, or a table."""
        assert wish_of_arguments(None, None, ()) is None
        assert Wish() == wish_of_arguments("chunkllm", None, ())
        assert Wish(Path("x.toml"), ["a=1"]) == wish_of_arguments("chunkllm", "x.toml", ["a=1"])
        assert Wish(None, ["a.b=1"]) == wish_of_arguments("chunkllm", None, {"a": {"b": 1}})

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            (("medusa", None, ()), "plugin='medusa': the bridge is called 'chunkllm'"),
            ((None, "x.toml", ()), "need plugin='chunkllm'"),
            ((None, None, ["a=1"]), "need plugin='chunkllm'"),
        ],
    )
    def test_refusals(self, given: Any, reason: str) -> None:
        with pytest.raises(IncompatibleError, match=reason):
            wish_of_arguments(*given)


class Tree(Plugin):
    """Wants three nodes for each token; asking can fail."""

    spec = PluginSpec(name="tree", version="1", abi=(1, 1), seams={Seam.DRAFTS})

    def plan_drafts(self, step: DraftsStep) -> None: ...

    def draft_nodes(self, tokens: int) -> int:
        if tokens == 13:
            raise ValueError("thirteen")
        return 3 * tokens if tokens > 1 else 0


class TestDraftSlots:
    def slots(self, **settings: Any) -> tuple[int, int] | None:
        catalogue = FakeCatalogue(Tree)
        values = {key.replace("__", "."): value for key, value in settings.items()}
        return draft_slots(spec_for(FakeEngine(), values, catalogue), catalogue)

    def test_as_many_as_the_plugin_says(self) -> None:
        """Never fewer nodes than tokens."""
        assert (4, 12) == self.slots(speculative__plugin="tree")
        assert (2, 6) == self.slots(speculative__plugin="tree", speculative__tokens=2)
        assert (1, 1) == self.slots(speculative__plugin="tree", speculative__tokens=1)

    @pytest.mark.parametrize("off", ["tree", "everything"])
    def test_an_engine_that_is_not_to_speculate(self, off: str) -> None:
        """Nobody is named, a table alone, or who is named is switched off."""
        assert self.slots() is self.slots(plugins__tree={})
        assert self.slots() is None
        assert self.slots(speculative__plugin="tree", plugin__disable=off) is None

    def test_a_plugin_that_cannot_say_is_refused(self) -> None:
        with pytest.raises(IncompatibleError, match="asking for its draft nodes raised ValueError: thirteen"):
            self.slots(speculative__plugin="tree", speculative__tokens=13)


class TestResolve:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def test_a_passport_for_what_was_wished(self) -> None:
        passport = resolve(Wish(sets=["plugin.priority=7"], strict=False), [], INFO)

        assert 7 == passport.spec["plugin.priority"]
        assert not passport.strict
        assert passport == Passport.from_wire(passport.to_wire())
        passport.verify("scheduler")

    def test_every_reason_at_once(self) -> None:
        """What the engine lost, what changed in it, and what it cannot do."""
        probes = [
            Probe(target="engine:gone", status="missing", detail="no such thing"),
            Probe(target="engine:moved", status="changed", detail="source fingerprint 0"),
            Probe(target="engine:here", status="present"),
        ]
        about = attrs.evolve(INFO, capabilities=INFO.capabilities - {"seam.blocks"})
        with pytest.raises(IncompatibleError) as no:
            resolve(Wish(), probes, about)

        gone, moved, *others = no.value.reasons
        assert "engine:gone is missing: no such thing" == gone
        assert "engine:moved changed: source fingerprint 0 (--plugin-strict off starts all the same)" == moved
        assert ["paged_kv: fake 1 offers no seam blocks yet"] == others

    def test_what_changed_stops_a_strict_launch_only(self) -> None:
        changed = [Probe(target="engine:moved", status="changed")]

        assert not resolve(Wish(strict=False), changed, INFO).strict
        with pytest.raises(IncompatibleError, match="engine:moved changed"):
            resolve(Wish(), changed, INFO)

    def test_a_snapshot_folder_is_tried_at_start(self, tmp_path: Path) -> None:
        """And not only when the first rollback looks there."""
        file = tmp_path / "chunkllm.toml"
        file.write_text(f"rollback.config = '{file / 'state'}'\n")

        with pytest.raises(ConfigError, match=r"rollback\.config"):
            resolve(Wish(file), [], INFO)

    def test_what_is_risky_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        """Once, where the engine is launched, and not in each of its processes."""
        with caplog.at_level(logging.WARNING, "chunkllm"):
            resolve(Wish(sets=["plugin.batch_window=300ms"]), [], INFO)

        assert "spec.risk" in caplog.text
        assert "plugin.batch_window = 300ms is above the advised" in caplog.text
