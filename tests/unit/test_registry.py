"""Names to plugins."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from chunkllm_bridge import Plugin, PluginSpec, Seam
from chunkllm_bridge.common.errors import BridgeError, IncompatibleError
from chunkllm_bridge.common.registry import ALLOW, GROUP, Registry
from chunkllm_bridge.common.testing import FakeCatalogue

PAGED = "chunkllm_bridge.plugins.paged_kv:PagedKV"


class Mine(Plugin):
    spec = PluginSpec(name="mine", version="1.0", abi=(1, 0), seams={Seam.BLOCKS})


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=GROUP)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """A plugin whose module raises at import and whose facts are no literals."""
    (tmp_path / "registry_broken.py").write_text(
        "raise OSError('no such library')\nclass Broken:\n    spec = PluginSpec(name=NAME)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return point("broken", "registry_broken:Broken")


def test_the_group_is_the_one_that_we_ourselves_declare() -> None:
    """The name in code, in hints and in the package is one. Case: sglang#28819."""
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]

    assert "chunkllm.plugins" == GROUP
    declared = project["entry-points"][GROUP]
    assert declared == {name: Registry.installed({}).source(name).split(" of ")[0] for name in declared}


def test_installed_plugins_are_found() -> None:
    """The bridge's own come through entry points like anybody's."""
    assert {"batch_window", "paged_kv"} <= set(Registry.installed({}).names())


def test_one_name_from_two_distributions_is_refused_with_both() -> None:
    """Order of installation decides nothing, and only who names it is refused. Cases:
    unified-cache-management#433, verl#7837."""
    registry = Registry([point("mine", "a:Mine"), point("other", "c:Other"), point("mine", "b:Mine")])

    assert ["other"] == registry.names()
    with pytest.raises(BridgeError, match="registered by two distributions, a:Mine and b:Mine; uninstall one"):
        registry.facts("mine")


def test_one_plugin_found_twice_is_one() -> None:
    """A folder that is twice on the path is no conflict. Case: vllm#10443."""
    assert ["mine"] == Registry([point("mine", "a:Mine"), point("mine", "a:Mine")]).names()


def test_the_allow_list_spares_the_bridge_s_own() -> None:
    """What is not on it cannot be named, and says why."""
    found = [point("paged_kv", PAGED), point("mine", "a:Mine"), point("other", "b:Other")]
    registry = Registry(found, allow=frozenset({"other"}))

    assert ["other", "paged_kv"] == registry.names()
    with pytest.raises(BridgeError, match=f"plugin 'mine' is installed but not in {ALLOW}"):
        registry.facts("mine")


@pytest.mark.parametrize(
    ("value", "allowed"), [(None, None), ("", frozenset()), (" a, b ,", frozenset({"a", "b"})), ("1", frozenset({"1"}))]
)
def test_the_allow_list_is_read_from_the_environment(
    value: str | None, allowed: frozenset[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unset allows all, empty allows only ours. Case: vllm-ascend#4351, a switch tested all ways."""
    found = [point(name, f"{name}:X") for name in ("1", "a", "b", "c")]
    monkeypatch.setattr("chunkllm_bridge.common.registry.entry_points", lambda group: found)

    names = Registry.installed({} if value is None else {ALLOW: value}).names()

    assert sorted({"1", "a", "b", "c"} if allowed is None else allowed) == names


def test_a_wrong_name_is_answered_with_the_right_ones() -> None:
    """And with the nearest."""
    with pytest.raises(BridgeError) as caught:
        Registry([point("paged_kv", PAGED), point("mine", "a:Mine")]).load("pagedkv")

    assert "unknown plugin 'pagedkv' (known: mine, paged_kv); did you mean 'paged_kv'?" == str(caught.value)


def test_an_import_that_fails_keeps_its_own_words(broken: EntryPoint) -> None:
    """The operator hears what the module said, not that "a plugin failed"."""
    with pytest.raises(IncompatibleError, match="importing registry_broken:Broken: OSError: no such library"):
        Registry([broken]).load("broken")


def test_a_module_that_exits_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.exit() at import is a failed import. Case: vllm-plugin-FL#125, where every command died."""
    (tmp_path / "registry_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(IncompatibleError, match="SystemExit: 3"):
        Registry([point("exits", "registry_exits:X")]).load("exits")


def test_what_is_no_plugin_is_refused() -> None:
    """An entry point may name anything."""
    with pytest.raises(IncompatibleError, match="is not a subclass of"):
        Registry([point("path", "pathlib:Path")]).load("path")


def test_one_broken_plugin_spoils_no_list(broken: EntryPoint) -> None:
    """It says why it cannot be read; the others are listed as ever. Cases: simonw/llm#1280, vllm-plugin-FL#125."""
    rows = {row["name"]: row for row in Registry([broken, point("paged_kv", PAGED)]).describe()}

    assert ("unreadable", "installed") == (rows["broken"]["state"], rows["paged_kv"]["state"])
    assert "name=NAME is not a literal" in rows["broken"]["reasons"][0]
    assert ["blocks"] == rows["paged_kv"]["seams"]
    assert "unreadable" == Registry([broken]).version("broken")


def test_a_class_can_be_registered_without_being_installed() -> None:
    """For tests: beside the bridge's own, and with its facts."""
    catalogue = FakeCatalogue(Mine)

    assert {"mine", "paged_kv", "batch_window"} <= set(catalogue.names())
    assert (Mine, Mine.spec) == (catalogue.load("mine"), catalogue.facts("mine"))
