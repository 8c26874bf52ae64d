"""The contract: what it says, and that nobody changes it unawares."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import attrs
import pytest

from chunkllm_bridge import ABI, BatchingPlan, BlocksPlan, BlocksStep, Plugin, PluginSpec, Seam
from chunkllm_bridge.common import abi

SURFACE = Path(__file__).with_name("abi_surface.txt")


def facts(**changes: Any) -> PluginSpec:
    return PluginSpec(**{"name": "mine", "version": "1", "abi": ABI, "seams": {Seam.BLOCKS}, **changes})


def test_surface_is_the_one_on_record() -> None:
    """A change of the contract is seen, and dated by a new ABI version."""
    assert SURFACE.read_text() == abi.surface(), (
        "the ABI's surface changed: bump ABI minor (or major) and regenerate tests/unit/abi_surface.txt "
        "from chunkllm_bridge.common.abi.surface()"
    )


def test_surface_hash_is_of_that_text() -> None:
    """Who knows the text knows the hash."""
    assert hashlib.sha256(SURFACE.read_bytes()).hexdigest()[:12] == abi.SURFACE


def test_every_seam_has_a_verb_and_a_plan() -> None:
    """A seam that is added is added everywhere."""
    assert set(Seam) == set(abi.PLAN_TYPES)
    assert {f"plan_{seam.value}" for seam in Seam} == {name for name in vars(Plugin) if name.startswith("plan_")}


@pytest.mark.parametrize("version", [(ABI[0], ABI[1]), (ABI[0], 0)])
def test_same_major_and_no_newer_minor_fit(version: tuple[int, int]) -> None:
    """A plugin built for an older minor runs on."""
    assert [] == facts(abi=version).incompatibilities()


@pytest.mark.parametrize("version", [(ABI[0] + 1, 0), (ABI[0] - 1, 0), (ABI[0], ABI[1] + 1)])
def test_another_major_or_a_newer_minor_is_refused(version: tuple[int, int]) -> None:
    """With both versions in the reason. Case: LMCache#1589, which version works with which."""
    (reason,) = facts(abi=version).incompatibilities()

    assert f"built for ABI {version[0]}.{version[1]}, this bridge speaks {ABI[0]}.{ABI[1]}" == reason


def test_a_refusal_lists_every_reason() -> None:
    """Three mistakes, three reasons, in one answer."""
    reasons = facts(abi=(99, 0), seams=(), surface="0123456789ab").incompatibilities()

    assert [
        "built for ABI 99.0, this bridge speaks 1.2",
        f"built against ABI surface 0123456789ab, this bridge has {abi.SURFACE}",
        "names no seam (there are: attention, blocks, drafts, weights, batching)",
    ] == reasons


def test_own_surface_is_accepted() -> None:
    """A plugin that shares structs may pin the very surface that this host has."""
    assert [] == facts(surface=abi.SURFACE).incompatibilities()


@pytest.mark.parametrize("name", ["", "Mine", "1st", "my-plugin", "a.b"])
def test_a_name_is_an_identifier_in_lower_case(name: str) -> None:
    """It becomes part of a dotted key, so it has no dots of its own."""
    with pytest.raises(ValueError, match="name"):
        facts(name=name)


def test_facts_are_frozen() -> None:
    """Nobody changes what a plugin said of itself."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        facts().version = "2"  # type: ignore[misc]


@pytest.mark.parametrize("limit", [-1, 1.5, "8", None])
def test_a_limit_is_a_whole_number_of_blocks(limit: Any) -> None:
    """Nonsense is refused where it is born: in the plugin's call, which the guard catches."""
    with pytest.raises((TypeError, ValueError)):
        BlocksPlan(limit=limit)


@pytest.mark.parametrize("seconds", [-0.001, 60, float("nan"), "soon", None])
def test_a_hold_is_less_than_a_minute(seconds: Any) -> None:
    """A hold that is no time, or no end, is refused where it is born."""
    with pytest.raises((TypeError, ValueError)):
        BatchingPlan(hold_until=seconds)


def test_a_plugin_that_writes_nothing_wants_nothing() -> None:
    """Every verb has a harmless default."""
    plugin = Plugin(abi.NoConfig())
    step = BlocksStep(index=0, total=1, held=0, available=1, running=0, waiting=0)

    assert [None] * len(Seam) == [getattr(plugin, f"plan_{seam.value}")(step) for seam in Seam]
    assert {} == plugin.snapshot()
