"""The base model in a folder: enough of it to check heads against, and the whole of it to ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkllm_bridge.common.errors import BridgeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NEEDS = "needs torch, transformers and safetensors: run it in the environment of an engine"
NAMES = {"embedding": "embed_tokens.weight", "lm_head": "lm_head.weight"}


class BaseError(BridgeError):
    """A model folder, or an environment, that heads cannot be made or checked with."""

    exit_code = 2


class Folder:
    """A `Model` read from its files, without the layers between embedding and LM head."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        try:
            import torch
            from transformers import AutoConfig
        except ImportError as error:
            raise BaseError(f"this {NEEDS} ({error})") from None
        if not (folder / "config.json").is_file():
            raise BaseError(f"{folder} is no model folder: config.json is missing there")
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        except (OSError, ValueError) as error:
            raise BaseError(f"{folder}/config.json cannot be read: {error}") from None
        self.folder = folder
        self.config: Mapping[str, Any] = config.to_dict()
        self.dtype = dtype or getattr(config, "dtype", None) or torch.float32
        self.device = torch.device("cpu")
        self._files = self._index()
        tied = bool(getattr(config, "tie_word_embeddings", False)) or self._found("lm_head") is None
        head = "embedding" if tied else "lm_head"
        self._names = {"embedding": self._found("embedding"), "lm_head": self._found(head)}
        if self._names["embedding"] is None:
            raise BaseError(f"{folder} holds no safetensors with an embedding ({NAMES['embedding']})")

    def _index(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        names = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as opened:
                    names.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise BaseError(f"{file} cannot be read: {error}") from None
        return names

    def _found(self, name: str) -> str | None:
        return next((key for key in self._files if key.endswith(NAMES[name])), None)

    def rows(self, name: str, ids: Tensor | None = None) -> Tensor:
        """As `Model.rows`."""
        from safetensors import safe_open

        key = self._names[name]
        assert key is not None
        with safe_open(self._files[key], "pt") as file:
            whole = file.get_tensor(key)
        found: Tensor = whole if ids is None else whole[ids]
        return found.to(self.dtype)


def is_known_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def whole(folder: Path, device: str) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers, to generate with: bfloat16 where the device multiplies it quickly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not is_known_tokenizer(folder):
        raise BaseError(f"{folder} holds no tokenizer")
    logging.disable_progress_bar()
    dtype = working_dtype(device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval().to(device)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def working_dtype(device: str) -> torch.dtype:
    """bfloat16 on a GPU and on CPUs that have it (AMX, AVX-512 BF16), else float32."""
    import torch

    mkldnn = torch.backends.mkldnn
    quick = device.startswith("cuda") or (mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if quick else torch.float32
