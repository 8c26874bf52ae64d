"""Linear layers on weights that oneDNN has laid out for its own kernels beforehand.

A plain `F.linear` in bfloat16 lays the weight out anew in every call; at 1 to 64 rows that is a third of its time.
The plain weight stays where it is (tied embeddings and weight updates need it), so packing doubles the weights' memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

ROWS = 8  # oneDNN lays out for about that many rows; the layout serves any number

_packed: dict[int, torch.Tensor] = {}  # address of the plain weight -> the packed one


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this machine has kernels for a packed weight of that type."""
    import torch

    if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
        return plain(x, weight) if packed is None else matmul(x, packed, None, "none", [], "")

    library = torch.library.Library("chunkllm_cpu", "DEF")
    library.define("linear(Tensor x, Tensor weight) -> Tensor")
    library.impl("linear", on_cpu, "CPU")
    torch.library.register_fake("chunkllm_cpu::linear", lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
    linear.library = library  # type: ignore[attr-defined]  # the registration lives as long as its object
    return torch.ops.chunkllm_cpu.linear.default
