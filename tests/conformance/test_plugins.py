"""Every plugin of this repository keeps what any plugin must keep, in the fake engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chunkllm_bridge import Plugin
from chunkllm_bridge.common.conformance import Check, checks
from chunkllm_bridge.plugins.batch_window import BatchWindow
from chunkllm_bridge.plugins.medusa.plugin import Medusa
from chunkllm_bridge.plugins.paged_kv import PagedKV
from tests.support import fake_heads


def tiny_quota() -> type[Plugin]:
    """The class of the separate package, by its folder: nothing is installed."""
    folder = str(Path(__file__).parents[1] / "plugins/tiny_quota")
    if folder not in sys.path:
        sys.path.append(folder)
    from tiny_quota import TinyQuota

    return TinyQuota


@pytest.mark.parametrize("check", checks(PagedKV, settings={"kv_cache.memory_ratio": 0.125}), ids=str)
def test_paged_kv(check: Check) -> None:
    check()


@pytest.mark.parametrize("check", checks(PagedKV), ids=str)
def test_paged_kv_without_a_ratio(check: Check) -> None:
    """It is always seated: without settings of its own it keeps the same promises, and plans nothing."""
    check()


@pytest.mark.parametrize("check", checks(BatchWindow, settings={"plugin.batch_window": "10ms"}), ids=str)
def test_batch_window(check: Check) -> None:
    check()


@pytest.mark.parametrize("check", checks(tiny_quota(), config={"blocks": 8}), ids=str)
def test_tiny_quota(check: Check) -> None:
    check()


@pytest.mark.parametrize("kind", ["independent", "sequential"])
@pytest.mark.parametrize("tree", [None, [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]], ids=["chain", "tree"])
@pytest.mark.parametrize("promise", [str(check) for check in checks(Medusa)])
def test_medusa(promise: str, tree: list[list[int]] | None, kind: str, tmp_path: Path) -> None:
    """With heads that are never right: drafts cost nothing but time."""
    config = {"heads": str(fake_heads.write(tmp_path / "heads.safetensors", kind=kind))}
    (check,) = [
        each for each in checks(Medusa, config=config | ({"tree": tree} if tree else {})) if str(each) == promise
    ]
    check()
