"""What a spec says of the engine's KV pool: how large, what fits beside it, and what the status shows of it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import attrs

from chunkllm_bridge.common.abi import EngineInfo
from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.common.quota import Counts, PoolQuota
from chunkllm_bridge.common.spec import Spec


def ratio_bytes(spec: Spec, about: EngineInfo) -> int | None:
    """Bytes that `kv_cache.memory_ratio` gives one rank's pool; None leaves the size to the engine."""
    ratio = spec["kv_cache.memory_ratio"]
    return None if ratio == "engine" else int(ratio * about.device_memory)


def pool_share(about: EngineInfo) -> float:
    """The ratio that the pool made at start is, with the one block that is never a request's."""
    return (about.total_blocks + 1) * about.block_bytes / max(1, about.device_memory)


# ---- at start ------------------------------------------------------------------------------------------------------


def check_shares(spec: Spec, about: EngineInfo, weights: int, off: Container[str]) -> None:
    """The sum of all shares and the weights must fit on the device; plugins that are off need none."""
    ratio = spec["kv_cache.memory_ratio"]
    parts = {"weights": weights / about.device_memory} if about.device_memory else {}
    if ratio != "engine":
        parts["kv_cache.memory_ratio"] = ratio
    for name in spec.active:
        if name not in off and (share := spec.for_plugin(name, "memory_ratio")):
            parts[f"plugins.{name}.memory_ratio"] = share
    if (total := sum(parts.values())) > 1 + 1e-9:
        terms = " + ".join(f"{name} {share:.2f}" for name, share in parts.items())
        raise IncompatibleError("the memory shares", [f"{terms} = {total:.2f} of the device's memory, more than all"])


def layer_reasons(sizes: Mapping[str, int], total: int, spec: Spec, about: EngineInfo) -> list[str]:
    """Whether a layer of one rank's pool (layer -> bytes) is too large, and the ratio that would fit."""
    most = spec["kv_cache.max_layer_bytes"]
    over = {layer: size for layer, size in sizes.items() if size > most}
    if not over:
        return []
    layer, size = max(over.items(), key=lambda item: item[1])
    fits = total / about.device_memory * most / size
    return [
        f"kv_cache.max_layer_bytes = {most}: {len(over)} of {len(sizes)} layers would hold more, {layer} {size} "
        f"bytes; kv_cache.memory_ratio = {fits:.4f} would fit"
    ]


def allowed_reasons(total: int, spec: Spec, about: EngineInfo, hint: str) -> list[str]:
    """Whether one rank's pool is larger than the ratio allows; `hint` names what makes this engine do that."""
    allowed = ratio_bytes(spec, about)
    if allowed is None or total <= allowed:
        return []
    return [
        f"kv_cache.memory_ratio = {spec['kv_cache.memory_ratio']} allows {allowed} bytes, the engine was told to "
        f"make {total} ({hint})"
    ]


# ---- while serving -------------------------------------------------------------------------------------------------


def check_ratio(spec: Spec, about: EngineInfo) -> None:
    """A quota cannot grow beyond the pool made at start."""
    ratio, most = spec["kv_cache.memory_ratio"], pool_share(about)
    if ratio != "engine" and int(ratio * about.device_memory) // about.block_bytes > about.total_blocks + 1:
        raise ControlError(
            f"kv_cache.memory_ratio = {ratio}: the pool made at start is {most:.4f} of the memory "
            f"({about.total_blocks} blocks); a larger one needs a restart",
            409,
        )


def pool_status(
    counts: Counts, quota: PoolQuota, about: EngineInfo, spec: Spec, *, holds: int, steps: int
) -> dict[str, Any]:
    """The "kv" part of the status. `holds` of the scheduler's `steps` held new prefills for a batch window."""
    return {
        **attrs.asdict(counts),
        **quota.as_dict(),
        "conserved": counts.conserved,
        "block_size": about.block_size,
        "block_bytes": about.block_bytes,
        "memory_ratio": spec["kv_cache.memory_ratio"],
        "memory_ratio_max": pool_share(about),
        "window_holds": holds,
        "steps": steps,
    }
