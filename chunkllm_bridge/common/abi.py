"""The contract between the bridge and a plugin: facts, steps, plans, outcomes, and the class an author writes.

Every hook takes one record, so that the contract can grow a field without breaking anybody. Records are frozen. Tensors
in a step are borrowed: they are valid during the call and must not be kept or written. A plan is data; `None` means
"as the engine would".
"""

from __future__ import annotations

import enum
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import torch

ABI: tuple[int, int] = (1, 2)
"""(major, minor). A plugin's major must equal the host's and its minor must not be newer."""


LONGEST_HOLD = 60.0
"""Seconds; no plan may hold a request so long."""


class Seam(enum.Enum):
    """A place in an engine where plugins may plan."""

    ATTENTION = "attention"  # once per forward pass, in a worker
    BLOCKS = "blocks"  # once per scheduler step: who may hold how many KV blocks
    DRAFTS = "drafts"  # once per forward pass, in a worker: tokens to verify
    WEIGHTS = "weights"  # once per layer at load
    BATCHING = "batching"  # once per scheduler step: hold new prefills or not


def _seams(values: Iterable[Seam | str]) -> frozenset[Seam]:
    return frozenset(Seam(value) for value in values)


def _names(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


def _abi(value: Sequence[int]) -> tuple[int, int]:
    major, minor = value
    return int(major), int(minor)


@attrs.frozen(kw_only=True)
class PluginSpec:
    """Facts about a plugin, readable without running it.

    Declare it in the class body with literal arguments: `chunkllm plugins list` and the launch checks read it from the
    source text, so that a plugin whose dependencies are missing can still say what it is.
    """

    name: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z][a-z0-9_]*"))
    version: str
    abi: tuple[int, int] = attrs.field(converter=_abi)
    seams: frozenset[Seam] = attrs.field(converter=_seams)
    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    optional: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    memory_bytes: int = 0  # device memory it will lease at least; 0 = none
    needs_accelerator: bool = False
    exclusive: bool = False  # wants its seams for itself: a second plugin there is refused
    summary: str = ""
    surface: str | None = None  # the ABI surface hash it was built against, for plugins that share structs in-process

    def incompatibilities(self) -> list[str]:
        """Every reason why this host cannot run the plugin, whatever the engine."""
        reasons = []
        major, minor = self.abi
        if major != ABI[0] or minor > ABI[1]:
            reasons.append(f"built for ABI {major}.{minor}, this bridge speaks {ABI[0]}.{ABI[1]}")
        if self.surface is not None and self.surface != SURFACE:
            reasons.append(f"built against ABI surface {self.surface}, this bridge has {SURFACE}")
        if not self.seams:
            reasons.append(f"names no seam (there are: {', '.join(seam.value for seam in Seam)})")
        return reasons


@attrs.frozen(kw_only=True)
class KVLayout:
    """How one layer's KV cache lies in memory, verified by a probe write before anyone relies on it."""

    axes: tuple[str, ...]  # e.g. ("block", "kv_head", "slot", "k_or_v", "head_dim")
    dtype: str
    block_size: int  # slots (tokens) per block
    null_block: int | None = None
    scales: bool = False


@attrs.frozen(kw_only=True)
class EngineInfo:
    """Facts about the engine in this process, found once at attachment."""

    engine: str  # "vllm", "sglang", "fake"
    version: str
    role: str  # "core" (scheduler process) or "worker"
    capabilities: frozenset[str] = attrs.field(converter=_names)  # "kv.quota", "batch.window", "attn.switch", ...
    model: str = ""
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    dtype: str = ""
    kv_dtype: str = ""
    block_size: int = 0  # tokens per KV block
    block_bytes: int = 0  # bytes of one KV block over all layers of one rank
    total_blocks: int = 0  # blocks that requests can hold
    max_model_len: int = 0
    max_running: int = 0
    device: str = "cpu"
    device_memory: int = 0  # bytes; on a CPU the machine's or the cgroup's
    rank: int = 0
    world_size: int = 1
    layout: KVLayout | None = None
    draft_tokens: int = 0  # the most on one path that this engine was launched to verify; 0 = it does not speculate
    draft_nodes: int = 0  # the most per request; above draft_tokens it verifies trees


# ---- steps: what a plugin sees -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BlocksStep:
    """The KV pool before a scheduler step. Units: blocks. available + held == total."""

    index: int
    total: int
    held: int  # by requests
    available: int  # free, or cached without a holder and so evictable
    running: int
    waiting: int


@attrs.frozen(kw_only=True)
class BatchingStep:
    """The waiting queue before a scheduler step."""

    index: int
    new_waiting: int  # requests never scheduled so far
    running: int
    slots: int  # requests that could still be admitted
    waiting_tokens: int  # prompt tokens of the new requests
    budget_tokens: int  # tokens that one step may prefill
    oldest_wait: float  # seconds that the first new request has waited
    arrivals_possible: bool  # False when nothing else can arrive while this request is held


@attrs.frozen(kw_only=True)
class AttentionStep:
    """One forward pass, before its attention metadata is built."""

    index: int
    num_requests: int
    num_tokens: int
    decode_only: bool
    query_start_loc: torch.Tensor  # (num_requests + 1,) int32
    seq_lens: torch.Tensor  # (num_requests,) int32
    block_table: torch.Tensor  # (num_requests, max_blocks) int32


def _unread(request: int, first: int) -> Sequence[int] | None:
    return None


@attrs.frozen(kw_only=True)
class DraftsStep:
    """The requests that may be extended with draft tokens, after their newest token was sampled."""

    index: int
    request_ids: tuple[str, ...]
    hidden_states: torch.Tensor  # (num_requests, hidden_size), after the final norm: each gave its last token
    last_tokens: torch.Tensor  # (num_requests,) int64
    max_tokens: int  # the most draft tokens on one path, at least 1
    max_nodes: int  # the most draft tokens per request; above max_tokens a tree may be drafted
    context: Callable[[int, int], Sequence[int] | None] = _unread
    """(request's place, first) -> its prompt's and output's token ids from place `first` on, the last of them
    last_tokens[request]. None where the host has not read them yet: an engine that schedules ahead on a GPU."""


@attrs.frozen(kw_only=True)
class WeightsStep:
    """One layer's weight at load time."""

    layer: str  # the engine's own prefix, e.g. "model.layers.0.mlp.gate_up_proj"
    weight: torch.Tensor  # (out_features, in_features)


# ---- plans: what a plugin wants ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BlocksPlan:
    """A cap on the blocks that requests may hold. It stands until a later plan replaces it."""

    limit: int = attrs.field(validator=[attrs.validators.instance_of(int), attrs.validators.ge(0)])


@attrs.frozen(kw_only=True)
class BatchingPlan:
    """Hold new prefills until the oldest of them has waited so long (seconds). Decodes are never held."""

    hold_until: float = attrs.field(
        converter=float, validator=[attrs.validators.ge(0.0), attrs.validators.lt(LONGEST_HOLD)]
    )


@attrs.frozen(kw_only=True)
class AttentionPlan:
    """The strategy that computes this pass."""

    strategy: str


@attrs.frozen(kw_only=True)
class DraftsPlan:
    """Draft tokens per request, in the order of the step; they stay on the device."""

    tokens: torch.Tensor  # (num_requests, width) int64; a chain ends before the first negative one
    parents: tuple[int, ...] | None = None  # a tree: each column's parent column, which stands before it; -1 = the root
    sources: tuple[str, ...] | None = None
    """Per request what drafted for it, where a plugin has several ways to: they are counted, and judged, apart."""


@attrs.frozen(kw_only=True)
class WeightsPlan:
    """How this layer's weight is to be stored."""

    format: str  # e.g. "fp8_e4m3"
    per_channel: bool = True


Step = BlocksStep | BatchingStep | AttentionStep | DraftsStep | WeightsStep
Plan = BlocksPlan | BatchingPlan | AttentionPlan | DraftsPlan | WeightsPlan

PLAN_TYPES: Mapping[Seam, type[Plan]] = {
    Seam.ATTENTION: AttentionPlan,
    Seam.BLOCKS: BlocksPlan,
    Seam.DRAFTS: DraftsPlan,
    Seam.WEIGHTS: WeightsPlan,
    Seam.BATCHING: BatchingPlan,
}


@attrs.frozen(kw_only=True)
class Outcome:
    """How a plan went. `applied=False` with a reason: another plan won, or the engine went its own way."""

    seam: Seam
    step: int
    applied: bool
    reason: str = ""
    plan: Plan | None = None
    drafted: tuple[int, ...] = ()  # DRAFTS: draft tokens verified per request
    accepted: tuple[int, ...] = ()  # DRAFTS: those of them that the model agreed with
    sources: tuple[str, ...] = ()  # DRAFTS: what drafted for each request, as the plan said; the plugin's name if not
    seconds: float = 0.0  # DRAFTS: from one verification to the next; 0 = not known, or not comparable
    held: int = 0  # BLOCKS: blocks held after the step
    waited: float = 0.0  # BATCHING: seconds that the oldest new request has been held


# ---- the plugin ----------------------------------------------------------------------------------------------------


@runtime_checkable
class Memory(Protocol):
    """Device memory set aside under `plugin.memory_ratio`, until closed. The bridge closes what is left."""

    owner: str
    units: int  # bytes

    def close(self) -> None: ...


class LeaseMemory(Protocol):
    """Ask for bytes of device memory. None: the quota does not hold that much; go without."""

    def __call__(self, nbytes: int) -> Memory | None: ...


class Model(Protocol):
    """The loaded model, as far as a plugin may look into it. Tensors are copies, whole on every rank and device.

    Where several ranks share a matrix, each `rows` is one exchange between them: every rank must ask for the same.
    """

    @property
    def config(self) -> Mapping[str, Any]:
        """The text model's own config (transformers), plain data."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def rows(self, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of "embedding" or "lm_head", (len(ids) or vocab_size, hidden_size). Raises `KeyError` for others."""


@attrs.frozen(kw_only=True)
class Preparation:
    """What `prepare` gets: the engine's facts and the means to set resources aside."""

    info: EngineInfo
    generation: int
    lease_memory: LeaseMemory
    model: Model | None = None  # in a worker


@attrs.frozen
class NoConfig:
    """The config of a plugin that has none."""


class Plugin:
    """What an author subclasses: name the facts, plan for the seams named, and change state only in `settle`.

    One instance lives in each process that has one of its seams. Any exception costs that call only.
    """

    spec: ClassVar[PluginSpec]
    Config: ClassVar[type] = NoConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, info: EngineInfo) -> Sequence[str]:
        """Every reason against running here. No effects."""
        return ()

    def prepare(self, preparation: Preparation) -> None:
        """Heavy work, off the step path: load, compile, lease."""

    def plan_blocks(self, step: BlocksStep) -> BlocksPlan | None:
        """Pure, no waiting, no device sync; once per step. So are the other plans."""
        return None

    def plan_batching(self, step: BatchingStep) -> BatchingPlan | None:
        return None

    def plan_attention(self, step: AttentionStep) -> AttentionPlan | None:
        return None

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan | None:
        return None

    def plan_weights(self, step: WeightsStep) -> WeightsPlan | None:
        return None

    def draft_nodes(self, tokens: int) -> int:
        """DRAFTS: draft tokens per request to make room for at launch, where the engine verifies trees."""
        return tokens

    def settle(self, outcome: Outcome) -> None:
        """The only call that may change the plugin's own state."""

    def snapshot(self) -> Mapping[str, Any]:
        """State worth carrying into the next generation; plain data."""
        return {}

    def migrate(self, state: Mapping[str, Any]) -> None:
        """Take over the snapshot of the generation before."""

    def close(self) -> None:
        """Give back what was taken. May be called twice."""


def surface() -> str:
    """The ABI as text: every record's fields and every verb's parameters."""
    lines = []
    for record in (
        *(PluginSpec, KVLayout, EngineInfo, BlocksStep, BatchingStep, AttentionStep, DraftsStep, WeightsStep),
        *(BlocksPlan, BatchingPlan, AttentionPlan, DraftsPlan, WeightsPlan, Outcome, Preparation),
    ):
        fields = ", ".join(f"{field.name}: {field.type}" for field in attrs.fields(record))
        lines.append(f"{record.__name__}({fields})")
    for name, verb in inspect.getmembers(Plugin, inspect.isfunction):
        lines.append(f"Plugin.{name}{inspect.signature(verb)}")
    lines.append(f"Seam({', '.join(seam.value for seam in Seam)})")
    return "\n".join(lines) + "\n"


SURFACE: str = hashlib.sha256(surface().encode()).hexdigest()[:12]
"""The hash of the contract's surface; `tests/unit/abi_surface.txt` holds the text it was made from."""
