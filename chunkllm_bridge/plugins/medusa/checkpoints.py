"""Medusa heads as others store them: the original checkpoints, and what vLLM 0.32 reads.

* Original (github.com/FasterDecoding/Medusa): config.json with `medusa_num_heads`, `medusa_num_layers`; weights in
  medusa_lm_head.pt or .safetensors: `{head}.{block}.linear.weight` and `.bias`, then `{head}.{blocks}.weight`, the LM
  head of that head. A .pt file is read with `weights_only`: nothing in it is run.
* vLLM (vllm/model_executor/models/medusa.py): config.json with `num_heads`, `num_hidden_layers`; model.safetensors:
  `blocks.{head}.layers.{block}.weight` and perhaps `.bias`, `lm_heads.{head}.weight`, or one `lm_head.weight`, and
  `token_map`, the draft vocabulary.

Neither carries a fingerprint: shapes are checked, and whether the model is the right one cannot be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkllm_bridge import Model
from chunkllm_bridge.plugins.medusa.heads import Heads, Independent

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt")
BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
OLD_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
OLD_HEAD = re.compile(r"(\d+)\.\d+\.weight")


def load(path: Path, model: Model) -> Heads:
    """Heads from a folder, or from the file in it. Raises `HeadsError`."""
    from chunkllm_bridge.plugins.medusa.formats import HeadsError, bad_vocabulary, not_finite

    folder = path if path.is_dir() else path.parent
    file = next((folder / name for name in NAMES if (folder / name).exists()), None) if path.is_dir() else path
    if file is None:
        raise HeadsError(path, [f"the folder holds none of {', '.join(NAMES)}"])
    config = _config(path, folder / "config.json")
    stored = {_renamed(name): tensor for name, tensor in _stored(file).items()}
    blocks: dict[tuple[int, int, str], Tensor] = {}
    own: dict[int, Tensor] = {}
    reasons = not_finite(stored)
    for name, tensor in stored.items():
        if found := BLOCK.fullmatch(name):
            blocks[int(found[1]), int(found[2]), found[3]] = tensor
        elif found := HEAD.fullmatch(name):
            own[int(found[1])] = tensor
        elif name not in ("lm_head.weight", "token_map"):
            reasons.append(f"{name} is unknown here: neither the original Medusa's layout nor vLLM's has it")
    count = max([*(key[0] for key in blocks), *own], default=-1) + 1
    depth = max((key[1] for key in blocks), default=-1) + 1
    if not count:
        raise HeadsError(path, [*reasons, "there are no heads in it"])
    said = config.get("medusa_num_heads", config.get("num_heads"))
    if said is not None and said > count:
        reasons.append(f"config.json says {said} heads, and there are {count}")
    hidden, size = int(model.config["hidden_size"]), int(model.config["vocab_size"])
    biased = any(part == "bias" for *_, part in blocks)
    for head in range(count):
        for block in range(depth):
            for part, shape in (("weight", (hidden, hidden)), ("bias", (hidden,)))[: 1 + biased]:
                reasons += _misfit(f"block {block} of head {head}: {part}", blocks.get((head, block, part)), shape)
    vocabulary = stored.get("token_map")
    if vocabulary is not None:
        reasons += bad_vocabulary(vocabulary, size, "token_map")
    shared = stored.get("lm_head.weight", own.get(0) if config.get("original_lm_head") else None)
    candidates = size if vocabulary is None else len(vocabulary)
    lm_heads: dict[str, Tensor | None] = {}  # empty: the model's own is meant
    if shared is not None:
        lm_heads = {"lm_head": shared}
    elif own:
        lm_heads = {f"LM head of head {head}": own.get(head) for head in range(count)}
    for name, matrix in lm_heads.items():  # whole ones are cut to the draft vocabulary below
        reasons += _misfit(name, matrix, (size if matrix is not None and len(matrix) == size else candidates, hidden))
    if reasons:
        raise HeadsError(path, reasons)
    return _build(blocks, biased, (count, depth, hidden), list(lm_heads.values()), vocabulary, config, model)


def _build(
    blocks: Mapping[tuple[int, int, str], Tensor],
    biased: bool,
    shape: tuple[int, int, int],
    lm_heads: list[Tensor | None],
    vocabulary: Tensor | None,
    config: Mapping[str, Any],
    model: Model,
) -> Heads:
    import torch

    count, depth, hidden = shape
    size = int(model.config["vocab_size"])
    ids = torch.arange(size) if vocabulary is None else vocabulary.long().cpu()

    def stacked(part: str, *ends: int) -> Tensor:
        parts = [blocks[head, block, part] for head in range(count) for block in range(depth)]
        whole = torch.stack(parts) if parts else torch.empty(0)
        return whole.view(count, depth, *ends).to(model.device, model.dtype)

    rows = [
        (tensor[ids] if len(tensor) == size else tensor).to(model.device, model.dtype)
        for tensor in lm_heads
        if tensor is not None
    ]
    if not rows:
        head = model.rows("lm_head", ids.to(model.device)).to(model.dtype)
    else:
        head = rows[0] if len(rows) == 1 else torch.stack(rows)
    named = config.get("base_model_name_or_path") or config.get("base_model") or "unknown"
    return Independent(
        weights=stacked("weight", hidden, hidden),
        biases=stacked("bias", hidden) if biased else None,
        head=head,
        vocabulary=ids.to(model.device),
        facts={"kind": "independent", "heads": str(count), "base_model": named, "config": dict(config)},
        verified=False,
    )


def _misfit(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> list[str]:
    if tensor is None:
        return [f"{name} is missing"]
    if tuple(tensor.shape) != shape:
        return [f"{name} is {tuple(tensor.shape)}, where this model's heads need {shape}"]
    return []


def _config(path: Path, file: Path) -> dict[str, Any]:
    from chunkllm_bridge.plugins.medusa.formats import HeadsError

    if not file.exists():
        raise HeadsError(path, [f"it is not of our own layout, and for the others {file.name} is missing beside it"])
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadsError(path, [f"{file.name} cannot be read ({error})"]) from None
    if not isinstance(config, dict):
        raise HeadsError(path, [f"{file.name} is no JSON object"])
    return config


def _stored(file: Path) -> Mapping[str, Tensor]:
    import pickle

    import torch

    from chunkllm_bridge.plugins.medusa.formats import HeadsError, read

    if file.suffix == ".safetensors":
        return read(file)[1]
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise HeadsError(file, [f"it is truncated, or holds more than weights and is not run ({reason})"]) from None
    if not isinstance(stored, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in stored.values()):
        raise HeadsError(file, ["it holds no mapping of names to tensors"])
    return stored


def _renamed(name: str) -> str:
    """The original's names as vLLM's."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if found := OLD_BLOCK.fullmatch(name):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    if found := OLD_HEAD.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return name
