"""Is the installed SGLang one that the bridge can work on? Every seam, and the traps known around it."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

import attrs

from chunkllm_bridge.common.launching import NAME
from chunkllm_bridge.sglang import info, obstacles


def examine() -> dict[str, Any]:
    """What the installed engine has, as plain data."""
    probes = info.probes()
    return {
        "engine": "sglang",
        "version": info.version(),
        "versions": list(info.TESTED),
        "tested": info.version().split("+")[0] in info.TESTED,
        "healthy": all(probe.status == "present" for probe in probes),
        "capabilities": sorted(info.capabilities(probes)),
        "seams": [attrs.asdict(probe) for probe in probes],
        "notes": list(notes()),
    }


def notes() -> list[str]:
    found = [*obstacles.hidden_by(os.environ), *obstacles.platform_hidden(os.environ)]
    if not any(point.name == NAME for point in entry_points(group="sglang.srt.plugins")):
        found.append("no entry point `sglang.srt.plugins: chunkllm`: install chunkllm-bridge again")
    return found
