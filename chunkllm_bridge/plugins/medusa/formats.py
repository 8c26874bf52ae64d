"""Files of draft heads: what can be read, and every reason why one cannot be used with a model.

Our own layout is one safetensors file. Its metadata: `format`, `kind`, `heads`, `base_fingerprint`, `base_model`, and
under `facts` JSON with training data, recipe and measured acceptance. Its tensors, each stored as it is or as int8 with
one float32 scale per row in `NAME.scale`:

    vocabulary  (candidates,) integers                     the model's ids of the draft vocabulary
    independent: weights (heads, blocks, hidden, hidden), biases (heads, blocks, hidden)
    sequential:  states (heads or 1, layers, 2 inner, hidden), tokens (heads or 1, 2 inner, hidden),
                 outs (heads or 1, layers, hidden, inner), biases (heads, layers, 2 inner),
                 narrow (rank, hidden), widen (hidden, rank): a state's short form, and the way back from it
                 and perhaps follow (candidates, hidden): the model's state after each token alone; `tokens` is then
                 twice as wide, for the embedding and this

The two layouts of others are read by `checkpoints.py`; they do not say exactly which model they were made for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkllm_bridge import Model
from chunkllm_bridge.plugins.medusa.heads import EPS, Heads, Independent, Sequential

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "chunkllm-heads 1"
SAMPLES = 256  # embedding rows in a fingerprint
TENSORS = {
    "independent": ("vocabulary", "weights", "biases"),
    "sequential": ("vocabulary", "states", "tokens", "outs", "biases", "narrow", "widen"),
}
OPTIONAL = {"sequential": frozenset({"follow"}), "independent": frozenset[str]()}
SCALE = ".scale"


class HeadsError(Exception):
    """Draft heads that cannot be used; lists every reason."""

    def __init__(self, path: Path, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n  ".join([f"the draft heads {path} cannot be used:", *self.reasons]))


def fingerprint(model: Model) -> str:
    """Which model this is, whatever its name: sha256 of its shape and of evenly spaced rows of its embedding.

    The rows count as bfloat16, so that a bfloat16 checkpoint has the same fingerprint served in float32.
    """
    import torch

    config = model.config
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta")
    shape = {
        **{key: config.get(key) for key in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "num_key_value_heads": config.get("num_key_value_heads") or config.get("num_attention_heads"),
        **{key: config.get(key) for key in ("intermediate_size", "vocab_size")},
        "rope_theta": None if theta is None else float(theta),
    }
    count = config["vocab_size"]
    ids = torch.tensor([place * count // SAMPLES for place in range(SAMPLES)], device=model.device)
    rows = model.rows("embedding", ids).to(torch.bfloat16).cpu().contiguous()
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    digest.update(rows.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def load(path: Path, model: Model) -> Heads:
    """The heads in a file or folder, ready to draft for this model. Raises `HeadsError`."""
    from chunkllm_bridge.plugins.medusa import checkpoints

    if not path.exists():
        raise HeadsError(path, ["there is no such file or folder"])
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.safetensors"))
        own = [file for file in files if _metadata(file).get("format", "").startswith("chunkllm")]
        if len(own) != 1:
            raise HeadsError(path, [f"the folder has no config.json, and {len(own)} files of our own layout, not one"])
        path = own[0]
    if path.is_file() and path.suffix == ".safetensors":
        metadata, tensors = read(path)
        if "format" in metadata:
            return _own(path, metadata, tensors, model)
    return checkpoints.load(path, model)


def _metadata(path: Path) -> Mapping[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file. Raises `HeadsError` if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        text = f"it is truncated or no safetensors file ({error}); copy it again or train heads anew"
        raise HeadsError(path, [text]) from None


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """A reason for each tensor with NaN or infinity in it."""
    reasons = []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (bad := int((~tensor.isfinite()).sum())):
            reasons.append(f"{name} holds {bad} values that are NaN or infinite: the file is damaged, train heads anew")
    return reasons


def bad_vocabulary(vocabulary: Tensor, size: int, name: str = "vocabulary") -> list[str]:
    """Reasons against a draft vocabulary for a model with so many tokens."""
    reasons = []
    if vocabulary.dim() != 1 or not len(vocabulary) or vocabulary.is_floating_point():
        return [f"{name} is {tuple(vocabulary.shape)} {vocabulary.dtype}, not a list of token ids"]
    if int(vocabulary.min()) < 0 or int(vocabulary.max()) >= size:
        low, high = int(vocabulary.min()), int(vocabulary.max())
        reasons.append(f"{name} names tokens from {low} to {high}, and the model has 0 to {size - 1}")
    if len(set(vocabulary.tolist())) != len(vocabulary):
        reasons.append(f"{name} names a token twice")
    return reasons


def _own(path: Path, metadata: Mapping[str, str], stored: dict[str, Tensor], model: Model) -> Heads:
    kind, hidden = metadata.get("kind", ""), int(model.config["hidden_size"])
    if metadata["format"] != FORMAT:
        raise HeadsError(path, [f"its format is {metadata['format']!r}, this bridge reads {FORMAT!r}"])
    if kind not in TENSORS:
        raise HeadsError(path, [f"its kind is {kind!r}; there are {', '.join(TENSORS)}"])
    reasons = []
    if (theirs := metadata.get("base_fingerprint", "")) != (ours := fingerprint(model)):
        name = metadata.get("base_model", "unknown")
        reasons.append(
            f"the draft heads must be in step with the model: they were made for {name}, fingerprint {theirs[:12]}, "
            f"and the model here has fingerprint {ours[:12]}; train heads for it with `chunkllm heads train`"
        )
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(SCALE)}
    reasons += [f"{name} is unknown here" for name in sorted(set(tensors) - {*TENSORS[kind], *OPTIONAL[kind]})]
    reasons += [f"{name} is missing" for name in TENSORS[kind] if name not in tensors]
    reasons += not_finite(stored)
    if not reasons:
        heads = len(tensors["biases"])
        reasons += [*_misshapen(kind, tensors, hidden), *_bad_scales(stored, tensors)]
        if metadata.get("heads") != str(heads):
            reasons.append(f"it says that it has {metadata.get('heads')} heads, and biases are for {heads}")
        reasons += bad_vocabulary(tensors["vocabulary"], int(model.config["vocab_size"]))
    if reasons:
        raise HeadsError(path, reasons)
    facts = {**json.loads(metadata.get("facts", "{}")), **{k: v for k, v in metadata.items() if k != "facts"}}
    whole = {name: dense(stored, name).to(model.device) for name in tensors}
    return _build(kind, whole, facts, model)


def _misshapen(kind: str, tensors: Mapping[str, Tensor], hidden: int) -> list[str]:
    """Compare every tensor's shape with what the others and the model say; None in a shape is free."""
    heads = len(tensors["biases"])
    if kind == "independent":
        blocks = tensors["weights"].shape[1] if tensors["weights"].dim() > 1 else 0
        wanted = {"weights": (heads, blocks, hidden, hidden), "biases": (heads, blocks, hidden)}
    else:
        states = tensors["states"]
        own, layers, double = states.shape[:3] if states.dim() == 4 else (1, 1, 0)
        if own not in (1, heads):
            return [f"states are for {own} heads, and biases for {heads}"]
        wanted = {
            "states": (own, layers, double, hidden),
            "tokens": (own, double, 2 * hidden if "follow" in tensors else hidden),
            "outs": (own, layers, hidden, double // 2),
            "biases": (heads, layers, double),
            "narrow": (len(tensors["narrow"]), hidden),
            "widen": (hidden, len(tensors["narrow"])),
        }
        if "follow" in tensors:
            wanted["follow"] = (len(tensors["vocabulary"]), hidden)
    return [
        f"{name} is {tuple(tensors[name].shape)}, where this model's heads need {shape}"
        for name, shape in wanted.items()
        if tuple(tensors[name].shape) != shape
    ]


def _bad_scales(stored: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    import torch

    reasons = []
    for name, tensor in tensors.items():
        scale = stored.get(name + SCALE)
        if tensor.dtype == torch.int8 and (scale is None or scale.shape != tensor.shape[:-1]):
            reasons.append(f"{name} is int8 and {name}{SCALE} does not hold one scale per row")
    return reasons


def dense(stored: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor as numbers, however it is stored."""
    import torch

    tensor = stored[name]
    return tensor if tensor.dtype != torch.int8 else tensor.float() * stored[name + SCALE][..., None]


def _build(kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], model: Model) -> Heads:
    import torch

    vocabulary = tensors["vocabulary"].long()
    own = {name: tensor.to(model.dtype) for name, tensor in tensors.items() if name != "vocabulary"}
    head = model.rows("lm_head", vocabulary).to(model.dtype)
    if kind == "independent":
        return Independent(**own, head=head, vocabulary=vocabulary, facts=facts, verified=True)
    rows = torch.full((int(model.config["vocab_size"]),), len(vocabulary), dtype=torch.long, device=model.device)
    rows[vocabulary] = torch.arange(len(vocabulary), device=model.device)
    known = seen(model.rows("embedding", vocabulary), tensors.get("follow"))
    own["tokens"] = (known @ tensors["tokens"].float().transpose(-1, -2)).to(model.dtype)
    own["coarse"] = (head.float() @ tensors["widen"].float()).to(model.dtype)
    for name in {"widen", "follow"} & set(own):
        del own[name]
    return Sequential(**own, head=head, rows=rows, vocabulary=vocabulary, facts=facts, verified=True)


def seen(embedding: Tensor, follow: Tensor | None) -> Tensor:
    """(candidates + 1, hidden or 2 * hidden) float32: what a head sees of each draft token, and zeros for others."""
    import torch
    from torch.nn.functional import rms_norm

    parts = [part.float() for part in (embedding, follow) if part is not None]
    known = torch.cat([rms_norm(part, part.shape[-1:], eps=EPS) for part in parts], -1)
    return torch.cat([known, torch.zeros_like(known[:1])])


def write(
    path: Path, kind: str, tensors: Mapping[str, Tensor], base: Mapping[str, str], facts: Mapping[str, Any]
) -> None:
    """A file of our layout, there whole or not at all; `base` is fingerprint and name of the model."""
    from safetensors.torch import save_file

    metadata = {
        "format": FORMAT,
        "kind": kind,
        "heads": str(len(tensors["biases"])),
        "base_fingerprint": base["fingerprint"],
        "base_model": base["name"],
        "facts": json.dumps(facts),
    }
    partial = path.with_name(path.name + ".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)
    partial.replace(path)


def as_int8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Both tensors that stand for one in a file: values, and a scale per row."""
    import torch

    scale = tensor.float().abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return {name: (tensor.float() / scale[..., None]).round().to(torch.int8), name + SCALE: scale}
