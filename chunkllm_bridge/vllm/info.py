"""What the installed vLLM is and has: all knowledge of its versions and fields is here."""

from __future__ import annotations

from typing import Any

import attrs

from chunkllm_bridge.common.abi import EngineInfo, Seam
from chunkllm_bridge.common.profiles import this_machine
from chunkllm_bridge.patches import Probe
from chunkllm_bridge.patches.vllm import PATCHES

TESTED = ("0.32.0",)
"""Versions that the whole suite runs on."""

SEAMS = frozenset({Seam.BLOCKS, Seam.BATCHING, Seam.DRAFTS})
"""Seams that this adapter offers so far."""
CHAIN, RAGGED = "spec.chain", "spec.ragged"
OFFERED = frozenset({"kv.quota", "batch.window", CHAIN, RAGGED, "control", "metrics", "tp", "prefix_cache"})


def version() -> str:
    """The engine's own word; "unknown" where a source build has none."""
    try:
        from vllm.version import __version__
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
        lost.add(RAGGED)
    seams = {f"seam.{seam.value}" for seam in SEAMS}
    return (OFFERED | seams) - lost


def launch_info(found: list[Probe] | None = None) -> EngineInfo:
    """What can be said before a model is chosen: enough to refuse a spec that cannot work here."""
    machine = this_machine()
    return EngineInfo(
        engine="vllm",
        version=version(),
        role="launch",
        capabilities=capabilities(found),
        device=machine.device,
        device_memory=machine.memory_bytes,
    )


def engine_info(vllm_config: Any, *, role: str, rank: int = 0) -> EngineInfo:
    """The facts of a resolved `VllmConfig`, before there is a KV pool."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text, drafts = model.hf_text_config, draft_tokens(vllm_config)
    return attrs.evolve(
        launch_info(),
        role=role,
        model=str(model.served_model_name or model.model),
        layers=model.get_num_layers(parallel),
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        hidden_size=model.get_hidden_size(),
        vocab_size=int(getattr(text, "vocab_size", 0)),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        max_model_len=model.max_model_len,
        max_running=vllm_config.scheduler_config.max_num_seqs,
        device=vllm_config.device_config.device_type,
        device_memory=device_memory(vllm_config),
        rank=rank,
        world_size=parallel.world_size,
        draft_tokens=drafts,
        draft_nodes=drafts,
    )


def draft_tokens(vllm_config: Any) -> int:
    """Draft tokens per request and step that this engine was launched to verify for us; chains only."""
    from chunkllm_bridge.vllm.drafts import is_ours

    speculative = vllm_config.speculative_config
    return int(speculative.num_speculative_tokens) if is_ours(speculative) else 0


def output_rank(vllm_config: Any) -> int:
    """The worker whose answers the engine takes, drafts among them: the first of the last pipeline stage."""
    parallel = vllm_config.parallel_config
    return int(parallel.world_size - parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)


def with_pool(info: EngineInfo, kv_cache_config: Any, block_size: int) -> EngineInfo:
    """The same facts once the KV pool is known. Block 0 is vLLM's null block, which requests never hold."""
    return attrs.evolve(
        info,
        block_size=block_size,
        block_bytes=pool_bytes(kv_cache_config) // max(1, kv_cache_config.num_blocks),
        total_blocks=max(0, kv_cache_config.num_blocks - 1),
    )


def device_memory(vllm_config: Any) -> int:
    """Bytes that one rank may count as its device's. Ranks on one machine's CPU share its memory."""
    if vllm_config.device_config.device_type == "cpu":
        parallel = vllm_config.parallel_config
        ranks = parallel.local_world_size * max(1, parallel.data_parallel_size_local)
        return this_machine().memory_bytes // max(1, int(ranks))
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def pool_bytes(kv_cache_config: Any) -> int:
    """Bytes of one rank's KV pool. In 0.32 every tensor record carries the size of the one allocation they lie in."""
    sizes = [int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors if not tensor.host_resident]
    return max(sizes, default=0)


def layer_bytes(kv_cache_config: Any) -> dict[str, int]:
    """KV bytes of each layer on one rank, the null block included."""
    sizes: dict[str, int] = {}
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs keeps one per layer
        for layer in group.layer_names:
            page = (specs[layer] if specs else group.kv_cache_spec).page_size_bytes
            sizes[layer] = page * kv_cache_config.num_blocks
    return sizes
