"""A loaded model whose layers run as compiled pieces between the engine's own attention calls.

The model's modules, weights and attention stay the engine's; only the loop over the layers is replaced, per instance,
and every forward that the pieces do not know goes through the loop that was there.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import structlog

from . import packed
from .pieces import Entry, Exit, Pieces, Rotation, Shape, make_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

log = structlog.get_logger("chunkllm.torch_cpu")

REFRESH = "_chunkllm_refresh"  # on a model: packs its weights anew
FEW = 64  # rows up to which a step is mostly decode: its loops are compiled to run on one thread
ROWS = (
    (256, FEW + 1, 1 << 24),
    (8, 2, FEW),
    (1, 1, 1),
)  # what is compiled: (a number of rows, the least and most it serves)


def speed_up(model: Any, compiler: Callable[..., Any] | None) -> None:
    """Give `model` the fast loop if it is of a kind that the pieces can follow; say which path it runs on, and why."""
    reasons = reasons_against(model)
    if reasons:
        log.warning("cpu.stock_path", model=type(model).__name__, reasons=reasons)
        return
    began = time.perf_counter()
    decoder = Decoder(model, compiler)
    decoder.refresh()
    _pack_head(model, decoder)
    _follow_updates(model, decoder)
    model.model.forward = decoder.forward
    if compiler is not None:
        decoder.warm_up()
    log.info(
        "cpu.fast_path",
        model=type(model).__name__,
        compiled=compiler is not None,
        packed=decoder.packed,
        seconds=round(time.perf_counter() - began, 1),
    )


def reasons_against(model: Any) -> list[str]:
    """Why the pieces cannot stand in for the layers of this model; each name is a module of it."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding
    from sglang.srt.models.llama import LlamaDecoderLayer, LlamaModel
    from sglang.srt.runtime_context import get_parallel

    inner: Any = getattr(model, "model", None)
    if type(inner) is not LlamaModel:
        return [f"{type(model).__name__} is not of the Llama kind"]
    if not all(type(layer) is LlamaDecoderLayer for layer in inner.layers):
        return ["a layer is not a LlamaDecoderLayer"]
    reasons = []
    parallel = get_parallel()
    if parallel.pp_size > 1 or parallel.attn_tp_size != parallel.tp_size:
        reasons.append("pipeline parallel, or attention parallel in another way than the rest")
    for name, linear in _linears(inner):
        if type(linear.quant_method) is not UnquantizedLinearMethod:
            reasons.append(f"{name} is {type(linear.quant_method).__name__}")
        if linear.bias is not None and not name.endswith("qkv_proj"):
            reasons.append(f"{name} has a bias")
    for name, norm in _norms(inner):
        if type(norm) is not RMSNorm or norm.variance_size_override or norm.cast_x_before_out_mul or norm.fp32_residual:
            reasons.append(f"{name} is not a plain RMSNorm")
    for index, layer in enumerate(inner.layers):
        rotary = layer.self_attn.rotary_emb
        if getattr(type(rotary), "forward_native", None) is not RotaryEmbedding.forward_native:
            reasons.append(f"layers.{index}: {type(rotary).__name__}")
        elif not rotary.is_neox_style or rotary.rotary_dim != rotary.head_size or hasattr(rotary, "sin_cos_cache"):
            reasons.append(f"layers.{index}: a rotation of {rotary.rotary_dim} of {rotary.head_size}, or not NeoX's")
        if type(layer.mlp.act_fn) is not SiluAndMul:
            reasons.append(f"layers.{index}: {type(layer.mlp.act_fn).__name__}")
    return reasons


class Decoder:
    """The loop over the layers of one `LlamaModel`, in pieces."""

    def __init__(self, model: Any, compiler: Callable[..., Any] | None) -> None:
        self.model = model.model
        self.stock = model.model.forward
        self.head_weight = model.lm_head.weight
        first = self.model.layers[0]
        attention = first.self_attn
        shape = Shape(
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            eps=first.input_layernorm.variance_epsilon,
        )
        self.rotary = attention.rotary_emb
        self.attentions = [layer.self_attn.attn for layer in self.model.layers]
        self.entries = [_entry(layer) for layer in self.model.layers]
        self.exits = [_exit(layer) for layer in self.model.layers]
        self.norm = self.model.norm.weight
        self.known = [(linear, linear.quant_method, linear.weight) for _, linear in _linears(self.model)]
        self.places = [(layer, layer.self_attn, layer.mlp) for layer in self.model.layers]
        self.packed = packed.can_pack(self.weights())
        linear = packed.linear() if self.packed else _plain_linear()
        self.pieces: Pieces = make_pieces(shape, linear, compiler, _reduce())
        self.angles: torch.Tensor | None = None

    def refresh(self) -> None:
        """Take over the weights' present values."""
        if self.packed:
            packed.pack(self.weights())

    def weights(self) -> Iterator[torch.Tensor]:
        for entry, exit in zip(self.entries, self.exits, strict=True):
            yield from (entry.qkv, exit.out, exit.gate_up, exit.down)
        yield self.head_weight

    def serves(self, rows: int) -> bool:
        """Whether the model is still the one that was looked at, and the forward is a plain one."""
        return (
            rows > 0
            and not self.model.layers_to_capture
            and all(
                now is linear and now.quant_method is method and now.weight is weight
                for now, (linear, method, weight) in zip(self._present(), self.known, strict=True)
            )
        )

    def _present(self) -> Iterator[Any]:
        for _, attention, mlp in self.places:
            yield from (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """As `LlamaModel.forward`: the normed hidden states, (rows, hidden)."""
        if not self.serves(positions.shape[-1]):
            return self.stock(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=pp_proxy_tensors)
        embedded = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds.contiguous()
        rotation = self.rotation(positions)
        pieces, exits, last = self.pieces, self.exits, len(self.exits) - 1
        q, k, v, residual = pieces.head(embedded, self.entries[0], rotation)
        for index, attention in enumerate(self.attentions[:-1]):
            attended = attention(q, k, v, forward_batch)
            q, k, v, residual = pieces.between(attended, residual, exits[index], self.entries[index + 1], rotation)
        attended = self.attentions[last](q, k, v, forward_batch)
        return pieces.tail(attended, residual, exits[last], self.norm)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """The angles of this step's rows, shared by all layers."""
        source = self.rotary.cos_sin_cache  # (positions, 2 * half), float32; may grow
        if self.angles is None or self.angles.shape[0] != source.shape[0]:
            cos, sin = source.float().chunk(2, -1)
            self.angles = cos.new_empty(source.shape[0], 2, 1, 2 * cos.shape[-1])
            self.angles[:, 0, 0] = cos.repeat(1, 2)
            self.angles[:, 1, 0] = sin.repeat(1, 2)
            self.angles[:, 1, 0, : sin.shape[-1]].neg_()
        rows = self.angles.index_select(0, positions.flatten())
        return Rotation(rows[:, 0], rows[:, 1])

    def warm_up(self) -> None:
        """Compile for every number of rows, before the server says that it is ready."""
        import torch
        from sglang.srt.utils import DynamicGradMode

        log.info("cpu.compiling", layers=len(self.exits), note="a minute at the first start, seconds at later ones")
        attention = self.attentions[0]
        with DynamicGradMode():  # as the engine's forwards: code compiled in another mode would not serve them
            for rows, least, most in ROWS:
                hidden = self.norm.new_zeros(rows, self.norm.shape[0])
                attended = hidden.new_zeros(rows, attention.tp_q_head_num * attention.v_head_dim)
                rotation = self.rotation(torch.zeros(rows, dtype=torch.int64))
                if most != least:
                    for tensor in (hidden, attended, *rotation):
                        torch._dynamo.mark_dynamic(tensor, 0, min=least, max=most)
                self.pieces.head(hidden, self.entries[0], rotation)
                self.pieces.between(attended, hidden, self.exits[0], self.entries[-1], rotation)
                self.pieces.tail(attended, hidden, self.exits[-1], self.norm)


def _reduce() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The sum over the ranks of this model, or None where there is one rank."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.runtime_context import get_parallel

    everybody: Callable[[torch.Tensor], torch.Tensor] = tensor_model_parallel_all_reduce
    return everybody if get_parallel().tp_size > 1 else None


def _plain_linear() -> Any:
    import torch

    return torch.nn.functional.linear


def _entry(layer: Any) -> Entry:
    return Entry(layer.input_layernorm.weight.data, layer.self_attn.qkv_proj.weight.data, layer.self_attn.qkv_proj.bias)


def _exit(layer: Any) -> Exit:
    return Exit(
        layer.self_attn.o_proj.weight.data,
        layer.post_attention_layernorm.weight.data,
        layer.mlp.gate_up_proj.weight.data,
        layer.mlp.down_proj.weight.data,
    )


def _linears(inner: Any) -> Iterator[tuple[str, Any]]:
    for index, layer in enumerate(inner.layers):
        for owner, name in (
            ("self_attn", "qkv_proj"),
            ("self_attn", "o_proj"),
            ("mlp", "gate_up_proj"),
            ("mlp", "down_proj"),
        ):
            yield f"layers.{index}.{owner}.{name}", getattr(getattr(layer, owner), name)


def _norms(inner: Any) -> Iterator[tuple[str, Any]]:
    for index, layer in enumerate(inner.layers):
        yield f"layers.{index}.input_layernorm", layer.input_layernorm
        yield f"layers.{index}.post_attention_layernorm", layer.post_attention_layernorm
    yield "norm", inner.norm


def _pack_head(model: Any, decoder: Decoder) -> None:
    """Let the logits be computed on the packed head; an embedding that is the same tensor stays as it was."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    head = model.lm_head
    if not decoder.packed or type(head.quant_method) is not UnquantizedEmbeddingMethod:
        return
    if model.logits_processor.use_fp32_lm_head:
        return
    linear = packed.linear()

    class PackedHead(UnquantizedEmbeddingMethod):  # type: ignore[misc]
        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            logits = linear(x, layer.weight)
            return logits if bias is None else logits + bias

    head.quant_method = PackedHead()


def _follow_updates(model: Any, decoder: Decoder) -> None:
    """Weights that are loaded anew while serving are packed anew; `model.load_weights` is the way they come."""
    load = model.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        packed.unpack(decoder.weights())
        result = load(*args, **kwargs)
        decoder.refresh()
        return result

    model.load_weights = load_weights
    setattr(model, REFRESH, decoder.refresh)


def follow_direct_updates() -> None:
    """The other way: SGLang's `load_format="direct"` copies into the parameters past the model."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    copy = weight_updater._model_load_weights_direct

    @functools.wraps(copy)
    def copy_and_refresh(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = copy(model, *args, **kwargs)
        getattr(model, REFRESH, lambda: None)()
        return result

    if not hasattr(copy, "__wrapped__"):
        weight_updater._model_load_weights_direct = copy_and_refresh
