"""Linear layers on weights that oneDNN has laid out for its own kernels beforehand.

A plain `F.linear` in bfloat16 lays the weight out anew in every call; at 1 to 64 rows that is a third of its time.
The plain weight stays where it is (tied embeddings and weight updates need it), so packing doubles the weights' memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

ROWS = 8  # oneDNN lays out for about that many rows; the layout serves any number
ROOM = 1.5  # times the weights' size must be free before they are packed: the KV cache is still to come

_packed: dict[int, torch.Tensor] = {}  # address of the plain weight -> the packed one


def can_pack(weights: Iterable[torch.Tensor]) -> bool:
    """Whether this machine has kernels for packed weights of that type, and memory for a second copy of them."""
    import torch
    from sglang.srt.utils.common import get_free_cpu_memory

    weights = list(weights)
    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available() or any(weight.dtype != torch.bfloat16 for weight in weights):
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return bool(get_free_cpu_memory() > ROOM * size)


def pack(weights: Iterable[torch.Tensor]) -> None:
    """Lay the weights out, each (out, in); those packed before are packed from their present values."""
    import torch

    for weight in weights:
        _packed[weight.data_ptr()] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def unpack(weights: Iterable[torch.Tensor]) -> None:
    """Forget the packed copies: `linear()` reads the plain weights again."""
    for weight in weights:
        _packed.pop(weight.data_ptr(), None)


@functools.cache
def linear() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`(rows, in), (out, in) -> (rows, out)`, opaque to the compiler; weights not packed are read plain."""
    import torch

    matmul = torch.ops.mkldnn._linear_pointwise.default
    plain = torch.nn.functional.linear

    def on_cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        packed = _packed.get(weight.data_ptr())
        return plain(x, weight) if packed is None or not x.shape[0] else matmul(x, packed, None, "none", [], "")

    torch_library: Any = torch.library
    library = torch_library.Library("chunkllm_cpu", "DEF")
    library.define("linear(Tensor x, Tensor weight) -> Tensor")
    library.impl("linear", on_cpu, "CPU")
    torch_library.register_fake("chunkllm_cpu::linear", lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
    linear.library = library  # type: ignore[attr-defined]  # the registration lives as long as its object
    return torch.ops.chunkllm_cpu.linear.default
