"""Facts from source text: nothing of a plugin runs to answer what it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkllm_bridge import PluginSpec, Seam
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.facts import read_facts, source_of
from chunkllm_bridge.plugins.batch_window import BatchWindow
from chunkllm_bridge.plugins.paged_kv import PagedKV

Install = Callable[..., None]

GOOD = """
raise RuntimeError("this module must not run")
class Mine(Plugin):
    spec = PluginSpec(name="mine", version="1.2", abi=(1, 0), seams={Seam.BLOCKS, Seam.DRAFTS}, memory_bytes=2)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a module's text where imports find it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, module: str = "facts_subject") -> None:
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()

    return write


def reasons(reference: str = "facts_subject:Mine") -> tuple[str, ...]:
    with pytest.raises(IncompatibleError) as caught:
        read_facts("mine", reference)
    return caught.value.reasons


def test_a_plugin_that_cannot_be_imported_still_says_what_it_is(install: Install) -> None:
    """ABI and seams are known in an interpreter that lacks what the plugin needs. Case: speculators#1008."""
    install(f"import an_engine_that_is_elsewhere{GOOD}")

    expected = PluginSpec(name="mine", version="1.2", abi=(1, 0), seams={Seam.BLOCKS, Seam.DRAFTS}, memory_bytes=2)
    assert expected == read_facts("mine", "facts_subject:Mine")


def test_no_package_on_the_way_is_run(install: Install) -> None:
    """A package whose __init__ raises gives its plugin's facts all the same. Case: speculators#1008."""
    install("raise RuntimeError('this package must not run')", "facts_pack.__init__")
    install(GOOD, "facts_pack.inner")

    assert "1.2" == read_facts("mine", "facts_pack.inner:Mine").version


@pytest.mark.parametrize("cls", [PagedKV, BatchWindow])
def test_built_in_facts_are_what_the_class_says(cls: type) -> None:
    """Two readings of one declaration cannot differ."""
    spec: PluginSpec = cls.spec  # type: ignore[attr-defined]

    assert spec == read_facts(spec.name, f"{cls.__module__}:{cls.__name__}")


def test_what_is_no_literal_is_refused_with_its_line(install: Install) -> None:
    """Every such argument, not only the first."""
    install(
        "VERSION = '1'\n"
        "class Mine(Plugin):\n"
        "    spec = PluginSpec(\n"
        "        name='mine', version=VERSION, abi=(1, 0),\n"
        "        seams=everything(),\n"
        "    )\n"
    )

    assert (
        "facts_subject:4: version=VERSION is not a literal, so it cannot be read without running it",
        "facts_subject:5: seams=everything() is not a literal, so it cannot be read without running it",
    ) == reasons()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class Other: ...", "defines no class Mine"),
        ("class Mine:\n    version = 1", "has no `spec = PluginSpec(...)`"),
        ("class Mine(", "cannot be read"),
        ("class Mine:\n    spec = PluginSpec(name='mine', seams={Seam.NOWHERE})", "seams={Seam.NOWHERE}"),
        ("class Mine:\n    spec = PluginSpec(name='mine', colour='red')", "colour"),
        ("class Mine:\n    spec = PluginSpec(name='mine', requires={['a']: 1})", "requires="),
        ("class Mine:\n    spec = PluginSpec(name='its', version='1', abi=(1, 0), seams=())", "says name='its'"),
    ],
)
def test_unreadable_facts_say_what_is_wrong(install: Install, text: str, reason: str) -> None:
    """An author hears which line to mend."""
    install(text)

    assert reason in "\n".join(reasons())


def test_a_plugin_that_is_not_installed(install: Install) -> None:
    """Named with its entry point, whether the module or its package is missing."""
    install("", "facts_pack2.__init__")

    assert "module gone.away is not installed (entry point gone.away:Mine)" in reasons("gone.away:Mine")
    assert source_of("facts_pack2.away") is None
    assert source_of("facts_pack2.__init__.deeper") is None
