"""Plugins of other packages, without installing them."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

from chunkllm_bridge.common.registry import GROUP

FOLDER = Path(__file__).parents[1] / "plugins"
CLASSES = {"tiny_quota": "tiny_quota:TinyQuota"}


def entry_point(name: str) -> EntryPoint:
    """The entry point that the package in `tests/plugins/NAME` declares; its folder is put on the path."""
    folder = str(FOLDER / name)
    if folder not in sys.path:
        sys.path.append(folder)
    return EntryPoint(name=name, value=CLASSES[name], group=GROUP)
