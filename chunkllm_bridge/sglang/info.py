"""What the installed SGLang is and has: all knowledge of its versions and fields is here."""

from __future__ import annotations

from typing import Any

import attrs

from chunkllm_bridge.common.abi import EngineInfo, Seam
from chunkllm_bridge.common.profiles import this_machine
from chunkllm_bridge.patches import Probe
from chunkllm_bridge.patches.sglang import PATCHES

TESTED = ("0.5.23",)
"""Versions that the whole suite runs on."""

SEAMS = frozenset({Seam.BLOCKS, Seam.BATCHING, Seam.DRAFTS})
"""Seams that this adapter offers so far; on SGLang all of them are in the process that schedules."""
CHAIN, TREE = "spec.chain", "spec.tree"


def version() -> str:
    """The engine's own word; "unknown" where a source build has none."""
    try:
        from sglang.version import __version__
    except ImportError:
        return "unknown"
    return str(__version__)


def probes() -> list[Probe]:
    """Each engine symbol that we wrap or lean on, compared with the one that was read."""
    return [patch.probe() for patch in PATCHES]


def capabilities(found: list[Probe] | None = None) -> frozenset[str]:
    """What can be offered here: a capability is there when every symbol it needs is."""
    found = probes() if found is None else found
    lost = {probe.capability for probe in found if not probe.usable}
    if CHAIN in lost:
        lost |= {TREE, f"seam.{Seam.DRAFTS.value}"}
    seams = {f"seam.{seam.value}" for seam in SEAMS}
    own = {"kv.quota", "batch.window", "control", "metrics", "tp", "prefix_cache", CHAIN, TREE}
    return frozenset(own | seams) - lost


def launch_info(found: list[Probe] | None = None) -> EngineInfo:
    """What can be said before a model is chosen: enough to refuse a spec that cannot work here."""
    machine = this_machine()
    return EngineInfo(
        engine="sglang",
        version=version(),
        role="launch",
        capabilities=capabilities(found),
        device=machine.device,
        device_memory=machine.memory_bytes,
    )


def engine_info(scheduler: Any, *, role: str) -> EngineInfo:
    """The facts of a scheduler whose model is loaded, before there is a KV pool."""
    from sglang.srt.runtime_context import get_parallel

    args, model, runner = scheduler.server_args, scheduler.model_config, scheduler.tp_worker.model_runner
    parallel = get_parallel()
    tokens, nodes = draft_slots(scheduler)
    return attrs.evolve(
        launch_info(),
        role=role,
        draft_tokens=tokens,
        draft_nodes=nodes,
        model=str(args.served_model_name or args.model_path),
        layers=model.num_hidden_layers,
        heads=model.num_attention_heads // parallel.attn_tp_size,
        kv_heads=model.get_num_kv_heads(parallel.attn_tp_size),
        head_size=model.head_dim,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        max_model_len=model.context_len,
        device=runner.device,
        device_memory=device_memory(runner.device),
        rank=parallel.tp_rank,
        world_size=parallel.tp_size,
    )


def draft_slots(scheduler: Any) -> tuple[int, int]:
    """(draft tokens on one path, draft tokens per request) that this engine was launched to verify; (0, 0): none."""
    from sglang.srt.runtime_context import get_spec

    from chunkllm_bridge.sglang.algorithm import NAME

    spec = get_spec()
    if spec.speculative_algorithm != NAME:
        return 0, 0
    return int(spec.speculative_num_steps), int(spec.speculative_num_draft_tokens) - 1


def with_pool(info: EngineInfo, scheduler: Any) -> EngineInfo:
    """The same facts once the KV pool is known. A pool has one page more than requests can hold (SGLang's padding)."""
    allocator = scheduler.token_to_kv_pool_allocator
    pages = int(allocator.size) // int(allocator.page_size)
    return attrs.evolve(
        info,
        block_size=int(allocator.page_size),
        block_bytes=int(sum(allocator.get_kvcache().get_kv_size_bytes())) // max(1, pages + 1),
        total_blocks=pages,
        max_running=int(scheduler.max_running_requests),
    )


def device_memory(device: str) -> int:
    """Bytes that one rank may count as its device's. Ranks on one machine's CPU share its memory."""
    from sglang.srt.runtime_context import get_parallel

    if device == "cpu":
        parallel = get_parallel()
        ranks = parallel.tp_size * max(1, parallel.dp_size) // max(1, parallel.nnodes)
        return this_machine().memory_bytes // max(1, int(ranks))
    from sglang.srt.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def weight_bytes(scheduler: Any) -> int:
    """Bytes of the weights on this rank."""
    model = scheduler.tp_worker.model_runner.model
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def token_bytes(pools: Any) -> int:
    """Bytes of one token's KV over all layers of one rank, as the engine's own sizing counts them."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    return int(getattr(create_memory_pool_configurator(pools), "_cell_size", 0))


def padding_bytes(pools: Any) -> int:
    """The page that the engine allocates beside those that it counts."""
    return token_bytes(pools) * int(pools.page_size)


def pool_bytes(pools: Any, config: Any) -> int:
    """Bytes of one rank's KV pool, before it is allocated."""
    return token_bytes(pools) * (int(config.max_total_num_tokens) + int(pools.page_size))


def layer_bytes(pools: Any, config: Any) -> dict[str, int]:
    """KV bytes of each layer on one rank. The layers of a pool that SGLang sizes by tokens are alike."""
    layers = max(1, int(pools.layer_info.num_effective_layers))
    return {f"layer {index}": pool_bytes(pools, config) // layers for index in range(layers)}


def rank() -> int:
    """This scheduler's place in its tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def rank_group(scheduler: Any) -> Any:
    """The schedulers that handle the same requests in the same order."""
    return scheduler.tp_group
