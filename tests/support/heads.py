"""Small draft heads for a model folder: sound ones in every layout, and ones that are wrong in a known way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkllm_bridge.heads import nets
from chunkllm_bridge.heads.base import Folder
from chunkllm_bridge.plugins.medusa import formats

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("own", "original", "original-pt", "vllm")  # all but the first hold independent heads


def write_heads(
    path: Path,
    model: Path,
    *,
    kind: str = "sequential",
    layout: str = "own",
    heads: int = 4,
    candidates: int | None = None,  # size of the draft vocabulary; None: all tokens
    first: int = 0,  # the lowest id in it; the others follow
    seed: int = 0,
    gain: float = 0.3,  # of what is random; 0: heads that repeat the last token, so each is one place behind
) -> Path:
    """Random heads that fit the model. `path` is a file in our own layout, a folder in the others; it is returned."""
    import torch

    base = Folder(model, torch.float32)
    hidden, size = base.config["hidden_size"], base.config["vocab_size"]
    ids = torch.arange(first, first + candidates) if candidates else torch.arange(size)
    shape = nets.Shape(kind=kind, heads=heads, hidden=hidden, inner=32, shared=False)
    weights = {name: tensor.detach() for name, tensor in nets.parameters(shape, seed, 2 * hidden).items()}
    random = torch.Generator().manual_seed(seed)
    for name in {"weights", "outs"} & set(weights):
        weights[name] = torch.randn(weights[name].shape, generator=random) * gain * weights[name].shape[-1] ** -0.5
    if layout != "own":
        return _write_foreign(path, layout, weights, base, ids)
    if kind == "sequential":
        weights["follow"] = torch.randn(len(ids), hidden, generator=random)
        weights |= nets.short_form(torch.randn(256, hidden, generator=random), base.rows("lm_head", ids), hidden)
    write_own(path, kind, {"vocabulary": ids.int(), **weights}, base)
    return path


def write_own(path: Path, kind: str, tensors: Mapping[str, Tensor], base: Folder) -> None:
    """Tensors as a file of our own layout, made for the model in that folder."""
    made_for = {"fingerprint": formats.fingerprint(base), "name": base.folder.name}
    formats.write(path, kind, tensors, made_for, {"data": "none, random", "acceptance": {}})


def shifted(path: Path, model: Path, *, kind: str = "sequential", heads: int = 4) -> Path:
    """Heads that are off by one place: the first drafts the token that the hidden state gave already."""
    return write_heads(path, model, kind=kind, heads=heads, gain=0.0)


def with_nan(path: Path, sound: Path, tensor: str = "biases") -> Path:
    """The same file of our own layout with one NaN in it."""
    from safetensors.torch import save_file

    metadata, tensors = formats.read(sound)
    tensors[tensor].view(-1)[0] = float("nan")
    save_file(tensors, path, metadata=metadata)
    return path


def truncated(path: Path, sound: Path) -> Path:
    """The first half of the file."""
    whole = sound.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def changed_model(path: Path, model: Path) -> Path:
    """A copy of a model folder under another name, whose embedding has moved a little: its heads are out of step."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensors[name] = tensor * 1.25
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def _write_foreign(path: Path, layout: str, weights: Mapping[str, Tensor], base: Folder, ids: Tensor) -> Path:
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    heads, blocks, hidden, _ = weights["weights"].shape
    size = base.config["vocab_size"]
    head = base.rows("lm_head", ids if layout == "vllm" else None)
    tensors: dict[str, Tensor] = {}
    config: dict[str, Any]
    for index in range(heads):
        for block in range(blocks):
            name = f"blocks.{index}.layers.{block}" if layout == "vllm" else f"{index}.{block}.linear"
            tensors[f"{name}.weight"] = weights["weights"][index, block].clone()
            tensors[f"{name}.bias"] = weights["biases"][index, block].clone()
        tensors[f"lm_heads.{index}.weight" if layout == "vllm" else f"{index}.{blocks}.weight"] = head.clone()
    if layout == "vllm":
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "medusa_fc_bias": True,
            "hidden_size": hidden,
            "num_heads": heads,
            "num_hidden_layers": blocks,
            "vocab_size": size,
        }
        if len(ids) < size:
            config["truncated_vocab_size"] = len(ids)
            tensors["token_map"] = ids
        save_file(tensors, path / "model.safetensors")
    else:
        name = base.folder.name
        config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": name}
        if layout == "original":
            save_file(tensors, path / "medusa_lm_head.safetensors")
        else:
            torch.save(tensors, path / "medusa_lm_head.pt")
    (path / "config.json").write_text(json.dumps(config))
    return path
