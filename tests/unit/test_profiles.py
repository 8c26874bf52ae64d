"""Hardware is found without an engine, and answered with the profile of the manual."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkllm_bridge.common.errors import ConfigError
from chunkllm_bridge.common.profiles import PROFILES, Hardware, choose, this_machine

GB = 10**9
CPU = Hardware(device="cpu", name="cpu", memory_bytes=24 * GB)


def gpu(name: str, memory: float, capability: tuple[int, int] | None) -> Hardware:
    return Hardware(device="cuda", name=name, memory_bytes=int(memory * GB), compute_capability=capability)


@pytest.mark.parametrize(
    ("expected", "hardware"),
    [
        ("h100", gpu("NVIDIA H100 80GB HBM3", 85, (9, 0))),
        ("h100", gpu("NVIDIA H200", 150, (9, 0))),
        ("h100", gpu("NVIDIA B200", 190, (10, 0))),
        ("h100", gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, (9, 0))),
        ("consumer", gpu("NVIDIA GeForce RTX 4090", 25.7, (8, 9))),
        ("consumer", gpu("Tesla T4", 16, (7, 5))),
        ("consumer", gpu("some card", 31.9, None)),
        ("consumer", gpu("NVIDIA GeForce RTX 5080", 17, (12, 0))),
        ("gpu", gpu("NVIDIA GeForce RTX 5090", 34.2, (12, 0))),
        ("gpu", gpu("NVIDIA A100-SXM4-80GB", 85, (8, 0))),
        ("gpu", gpu("NVIDIA L40S", 48, (8, 9))),
        ("cpu", CPU),
    ],
)
def test_profile_follows_from_the_hardware(expected: str, hardware: Hardware) -> None:
    """The first row of the manual's table that fits the machine is its profile."""
    assert expected == choose(hardware).name


@pytest.mark.parametrize("name", PROFILES)
def test_operator_overrides_the_hardware(name: str) -> None:
    """A named profile is taken on any machine."""
    assert name == choose(CPU, name).name


def test_unknown_profile_is_answered_with_the_nearest() -> None:
    """A wrong profile name is refused with the known ones and the nearest."""
    with pytest.raises(ConfigError, match=r"'h10'.*h100, consumer, gpu, cpu.*did you mean h100"):
        choose(CPU, "h10")


def test_profiles_are_frozen() -> None:
    """Nobody can change what a profile sets."""
    with pytest.raises(TypeError):
        PROFILES["consumer"].sets["plugin.memory_ratio"] = 1.0  # type: ignore[index]


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal:       16000 kB\nMemFree: 1 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("expected", "files"),
    [
        (16000 * 1024, {}),
        (5000, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "5000\n"}),
        (4000, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "4000\n"}),
        (16000 * 1024, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}),
        (3000, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "3000\n"}),
        (
            2000,
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
            },
        ),
        (
            16000 * 1024,
            {
                "proc/self/cgroup": "4:cpu,memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            },
        ),
    ],
)
def test_cpu_memory_is_the_tightest_limit(tmp_path: Path, expected: int, files: dict[str, str]) -> None:
    """A CPU's memory is the machine's, or that of the tightest cgroup around us, v1 and v2."""
    found = this_machine(root=machine(tmp_path, files), environ={"PATH": ""})

    assert Hardware(device="cpu", name="cpu", memory_bytes=expected) == found


def smi(folder: Path, script: str) -> dict[str, str]:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": str(folder)}


def test_gpu_is_asked_of_nvidia_smi(tmp_path: Path) -> None:
    """The first GPU's name, memory and compute capability are what nvidia-smi says."""
    environ = smi(tmp_path, "echo 'NVIDIA H100 80GB HBM3, 81559 MiB, 9.0'\necho 'other, 1 MiB, 1.0'")

    assert Hardware(
        device="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * 2**20, compute_capability=(9, 0)
    ) == this_machine(environ=environ)


def test_first_visible_gpu_is_the_one(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES decides which GPU is asked for."""
    environ = smi(tmp_path, 'echo "$3, 100 MiB, 8.0"') | {"CUDA_VISIBLE_DEVICES": "2,0"}

    assert "--id=2" == this_machine(environ=environ).name


def test_gpu_that_shares_the_machines_memory(tmp_path: Path) -> None:
    """Where nvidia-smi knows no memory of the GPU's own, the machine's counts."""
    environ = smi(tmp_path, "echo 'NVIDIA GB10, [N/A], 12.1'")

    assert 16000 * 1024 == this_machine(root=machine(tmp_path, {}), environ=environ).memory_bytes


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_hidden_gpus_are_none(tmp_path: Path, visible: str) -> None:
    """CUDA_VISIBLE_DEVICES can hide every GPU."""
    environ = smi(tmp_path, "echo 'NVIDIA H100, 81559 MiB, 9.0'") | {"CUDA_VISIBLE_DEVICES": visible}

    assert "cpu" == this_machine(environ=environ).device


@pytest.mark.parametrize("script", ["exit 9", "true", "echo nonsense", "echo 'No devices were found'"])
def test_failing_nvidia_smi_is_no_gpu(tmp_path: Path, script: str) -> None:
    """A driver that does not answer is no GPU, never an exception."""
    assert "cpu" == this_machine(environ=smi(tmp_path, script)).device


@pytest.mark.parametrize(
    ("expected", "hardware"),
    [
        (True, gpu("a", 80, (9, 0))),
        (True, gpu("a", 24, (8, 9))),
        (False, gpu("a", 80, (8, 0))),
        (False, gpu("a", 80, None)),
        (False, CPU),
    ],
)
def test_fp8_needs_compute_capability_8_9(expected: bool, hardware: Hardware) -> None:
    """FP8 is there from compute capability 8.9 up, never on a CPU."""
    assert expected is hardware.has_fp8
