"""What tests inside an engine's own process share: an environment that is put back, and packages of other authors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OURS = ("CHUNKLLM_ACTIVE", "CHUNKLLM_TOKEN", "CHUNKLLM_PLUGINS", "VLLM_PLUGINS")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No variable of ours is set, state goes to the test's folder, and what a launch sets is gone after the test."""
    before = dict(os.environ)
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lays a package with one plugin on the path, as pip would: a module, and metadata that names its entry point."""

    def lay(name: str, source: str, version: str = "1.0") -> Path:
        folder = tmp_path / f"site-{name}-{version}"
        info = folder / f"other_{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}_plugin.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: other-{name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[chunkllm.plugins]\n{name} = {name}_plugin:Plug\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, f"{name}_plugin", raising=False)
        return folder

    return lay


PLUGIN = """
from chunkllm_bridge import BlocksPlan, Plugin, PluginSpec, Seam

class Plug(Plugin):
    spec = PluginSpec(name="{name}", version="{version}", abi=(1, 0), seams={{Seam.BLOCKS}})

    def plan_blocks(self, step):
        {plan}
"""


def plugin_source(name: str, plan: str, version: str = "1.0") -> str:
    """A module with a BLOCKS plugin whose plan is that statement."""
    return PLUGIN.format(name=name, plan=plan, version=version)
