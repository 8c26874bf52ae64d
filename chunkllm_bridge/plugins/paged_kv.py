"""Paged KV-cache quota: requests together may hold no more than `kv_cache.memory_ratio` of the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from chunkllm_bridge import BlocksPlan, BlocksStep, EngineInfo, Plugin, PluginSpec, Preparation, Seam


@attrs.frozen(kw_only=True)
class Config:
    memory_ratio: float | Literal["engine"] = attrs.field(
        default="engine", metadata={"parameter": "kv_cache.memory_ratio"}
    )


class PagedKV(Plugin):
    spec = PluginSpec(
        name="paged_kv",
        version="1.0",
        abi=(1, 0),
        seams={Seam.BLOCKS},
        requires={"kv.quota"},
        summary="caps the KV blocks that requests hold; changeable while serving",
    )
    Config = Config

    def check(self, info: EngineInfo) -> Sequence[str]:
        if self.config.memory_ratio != "engine" and info.total_blocks and not info.block_bytes:
            return [f"{info.engine} does not say how many bytes a KV block has"]
        return ()

    def prepare(self, preparation: Preparation) -> None:
        info, ratio = preparation.info, self.config.memory_ratio
        self._plan = None
        if ratio != "engine" and info.block_bytes:
            self._plan = BlocksPlan(limit=max(1, int(ratio * info.device_memory) // info.block_bytes))

    def plan_blocks(self, step: BlocksStep) -> BlocksPlan | None:
        return self._plan
