"""The loaded model as plugins may look into it: its config, and whole rows of its two vocabulary matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch

CHUNK = 16_384
"""Rows that are fetched at once: what is copied twice stays small beside the answer."""


@attrs.frozen
class Kinds:
    """An engine's classes."""

    embedding: type[Any]  # the vocabulary's rows, shared between the ranks
    head: type[Any]  # an embedding that is used as LM head
    plain: type[Any]  # how such a layer keeps its rows where it does not quantize them


class Rows(ABC):
    """The `Model` of `Preparation`. Borrows the engine's layers, answers with copies."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device

    @abstractmethod
    def kinds(self) -> Kinds: ...

    @abstractmethod
    def modules(self) -> Iterable[Any]:
        """All of the loaded model."""

    def rows(self, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        """(len(ids) or vocab_size, hidden_size). With tensor parallelism one exchange: every rank asks for the same.

        Raises `KeyError` for other names, and where the model has no such matrix or keeps it in another form.
        """
        import torch

        layer, kinds = self._layer(name), self.kinds()
        if ids is None:
            ids = torch.arange(self.config["vocab_size"])
        ids = ids.to(device=self.device, dtype=torch.long).flatten()
        found = []
        with torch.no_grad():
            for some in torch.split(ids, CHUNK):
                # a head's own forward refuses to look rows up, though its weights are laid out as an embedding's
                part = kinds.embedding.forward(layer, some)
                found.append(part.clone() if part.data_ptr() == layer.weight.data_ptr() else part)
            return torch.cat(found)

    def _layer(self, name: str) -> Any:
        if name not in ("embedding", "lm_head"):
            raise KeyError(f"{name!r} (known: embedding, lm_head)")
        kinds, vocab, hidden = self.kinds(), self.config["vocab_size"], self.config["hidden_size"]
        found = [
            module
            for module in self.modules()
            if isinstance(module, kinds.embedding) and (module.org_vocab_size, module.embedding_dim) == (vocab, hidden)
        ]
        tables = [layer for layer in found if not isinstance(layer, kinds.head)]
        heads = [layer for layer in found if isinstance(layer, kinds.head)]
        layers = (heads or tables) if name == "lm_head" else tables  # a tied head may be the embedding itself
        if not layers:
            raise KeyError(f"{name!r}: the model has no layer of {vocab} x {hidden} for it")
        layer = layers[0]
        if not isinstance(layer.quant_method, kinds.plain):
            raise KeyError(f"{name!r}: kept as {type(layer.quant_method).__name__}, not as plain rows")
        return layer
