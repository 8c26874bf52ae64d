"""What the machine has, and the settings that go with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import attrs

from chunkllm_bridge.common.errors import ConfigError, Problem

_CONSUMER_BELOW = 32 * 10**9  # bytes; a "32 GB" card reports a little more than this
_HOPPER = (9, 0)
_NOT_DATA_CENTRE = re.compile(r"geforce|rtx|titan|thor|gb10\b", re.IGNORECASE)


@attrs.frozen(kw_only=True)
class Hardware:
    """What the engine runs on; found at the edge and passed in."""

    device: str  # "cpu", "cuda", ...
    name: str  # e.g. "NVIDIA H100 80GB HBM3", or "cpu"
    memory_bytes: int  # device memory; on a CPU the smaller of the machine's and the cgroup's
    compute_capability: tuple[int, int] | None = None

    @property
    def has_fp8(self) -> bool:
        return self.device != "cpu" and (self.compute_capability or (0, 0)) >= (8, 9)


def _frozen(sets: Mapping[str, object]) -> Mapping[str, object]:
    return MappingProxyType(dict(sets))


@attrs.frozen(kw_only=True)
class Profile:
    """Settings that suit a kind of machine; they beat the defaults and nothing else."""

    name: str
    sets: Mapping[str, object] = attrs.field(factory=dict, converter=_frozen, hash=False)
    forced: frozenset[str] = frozenset()  # keys that may be set lower, never higher
    emulates_fp8: bool = False  # no profile does yet
    why: str


PROFILES = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(
                name="h100",
                sets={"plugin.fp8": True, "attention.plugin": "flash2"},
                why="a Hopper or newer data-centre GPU",
            ),
            Profile(
                name="consumer",
                sets={"plugin.memory_ratio": 0.25},
                forced=frozenset({"plugin.memory_ratio"}),
                why="a GPU with less than 32 GB",
            ),
            Profile(name="gpu", why="a GPU that is neither of the data-centre kind nor small"),
            Profile(name="cpu", sets={"plugin.disable": "all"}, why="no GPU"),
        )
    }
)


def choose(hardware: Hardware, override: str | None = None) -> Profile:
    """The profile of this hardware, or the one that the operator names."""
    if override is not None and override not in PROFILES:
        reason = f"unknown profile (known: {', '.join(PROFILES)})"
        near = get_close_matches(override, PROFILES, n=1)
        raise ConfigError(
            [Problem(key="profile", value=override, reason=reason, where="profile", nearest=near[0] if near else None)]
        )
    return PROFILES[override or _fitting(hardware)]


def _fitting(hardware: Hardware) -> str:
    if hardware.device == "cpu":
        return "cpu"
    if (hardware.compute_capability or (0, 0)) >= _HOPPER and not _NOT_DATA_CENTRE.search(hardware.name):
        return "h100"
    return "consumer" if hardware.memory_bytes < _CONSUMER_BELOW else "gpu"


def this_machine(*, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Hardware:
    """Look at this machine without importing torch: the first visible GPU, or else the CPU and its memory."""
    memory = _cpu_memory(root)
    return _gpu(environ, memory) or Hardware(device="cpu", name="cpu", memory_bytes=memory)


def _cpu_memory(root: Path) -> int:
    """What this process may use: the machine's memory or the tightest cgroup limit above us."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    machine = int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of our cgroup and all its parents, v1 and v2. In a container ours may show as the mount's own root."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit = mount, "memory.max"
        elif "memory" in controllers.split(","):
            base, limit = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            written = _text(base / str(group).lstrip("/") / limit).strip()
            if written.isdecimal() and int(written) > 0:  # not "max"
                yield int(written)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gpu(environ: Mapping[str, str], machine_memory: int) -> Hardware | None:
    """The first GPU that CUDA would show us; None if there is none or nvidia-smi does not answer."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    first = "" if visible is None else visible.split(",")[0].strip()
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None or (visible is not None and first in ("", "-1")):
        return None
    only = [f"--id={first}"] if first.isdecimal() or first.startswith("GPU-") else []
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader", *only]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        name, memory, capability = (part.strip() for part in answer.splitlines()[0].rsplit(",", 2))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    mebibytes = re.match(r"\d+", memory)  # "[N/A]" where GPU and CPU share one memory
    version = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return Hardware(
        device="cuda",
        name=name,
        memory_bytes=int(mebibytes[0]) * 2**20 if mebibytes else machine_memory,
        compute_capability=(int(version[1]), int(version[2])) if version else None,
    )
