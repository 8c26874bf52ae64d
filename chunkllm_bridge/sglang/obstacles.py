"""Launches that the bridge cannot be in: each is refused before anything is spawned."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from chunkllm_bridge.common.launching import NAME
from chunkllm_bridge.common.profiles import this_machine

PLATFORM = "chunkllm_cpu"
"""Our platform for a machine without a GPU, as its entry point is called."""
PLATFORMS = "sglang.srt.platforms"

UNFIT: Mapping[str, tuple[Any, str]] = {
    "pp_size": (1, "stages of a pipeline schedule apart from each other"),
    "enable_dp_attention": (False, "its replicas share one group of ranks"),
    "disaggregation_mode": ("null", "its queues are not the scheduler's own"),
    "enable_pdmux": (False, "it schedules in a loop of its own"),
    "dllm_algorithm": (None, "it admits requests in a way of its own"),
    "ep_join_mode": (None, "the number of replicas may change"),
    "tokenizer_worker_num": (1, "its HTTP servers are processes in which SGLang loads no plugins"),
    "grpc_mode": (False, "it has no HTTP server of SGLang's"),
    "smg_grpc_mode": (False, "it has no HTTP server of SGLang's"),
    "encoder_only": (False, "it has no scheduler"),
    "use_ray": (False, "it starts its schedulers another way"),
}
"""Options that the bridge does not work with: field -> (the value with which it does, why)."""


def against(args: object, environ: Mapping[str, str]) -> list[str]:
    """Every reason against a launch with these arguments under these variables."""
    return [*hidden_by(environ), *unfit(args)]


def unfit(args: object) -> list[str]:
    """Why the bridge cannot work in a launch with these `ServerArgs`, or parsed flags of the same names."""
    reasons = []
    for field, (fits, why) in UNFIT.items():
        if (value := getattr(args, field, fits)) != fits:
            given = "" if value is True else f" {value}"
            reasons.append(f"--{field.replace('_', '-')}{given} is not supported: {why}")
    return reasons


def hidden_by(environ: Mapping[str, str]) -> list[str]:
    """Variables with which SGLang would not load us."""
    reasons = []
    given = environ.get("SGLANG_PLUGINS", "")
    if (allowed := listed(given)) and NAME not in allowed:
        reasons.append(f"SGLANG_PLUGINS={given} does not name {NAME}: SGLang would not know --plugin; add it there")
    platform = environ.get("SGLANG_PLATFORM", "")
    if platform and platform != PLATFORM and any(point.name == PLATFORM for point in entry_points(group=PLATFORMS)):
        why = f"SGLang then skips every plugin of a package that offers another platform, and ours offers {PLATFORM}"
        reasons.append(f"SGLANG_PLATFORM={platform}: {why}")
    if environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y", "on"):
        reasons.append("SGLANG_RUST_SERVER is set: that server has no control routes and no metrics of ours")
    return reasons


def platform_hidden(environ: Mapping[str, str]) -> list[str]:
    """The same for our platform, which only a machine without a GPU needs."""
    given = environ.get("SGLANG_PLUGINS", "")
    if (allowed := listed(given)) and PLATFORM not in allowed and this_machine().device == "cpu":
        return [f"SGLANG_PLUGINS={given} hides platforms too: on this machine without a GPU add {PLATFORM} as well"]
    return []


def listed(names: str) -> set[str]:
    return {name.strip() for name in names.split(",") if name.strip()}
