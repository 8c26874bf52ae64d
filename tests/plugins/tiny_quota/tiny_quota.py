"""A plugin in 30 lines: cap the KV blocks that requests hold, and count the steps."""

import attrs

from chunkllm_bridge import BlocksPlan, BlocksStep, Outcome, Plugin, PluginSpec, Seam


@attrs.frozen(kw_only=True)
class Config:
    blocks: int = attrs.field(default=8, validator=attrs.validators.ge(1))


class TinyQuota(Plugin):
    spec = PluginSpec(name="tiny_quota", version="0.1", abi=(1, 0), seams={Seam.BLOCKS}, requires={"kv.quota"})
    Config = Config
    steps = 0

    def plan_blocks(self, step: BlocksStep) -> BlocksPlan:
        return BlocksPlan(limit=self.config.blocks)

    def settle(self, outcome: Outcome) -> None:
        self.steps += 1

    def snapshot(self) -> dict[str, int]:
        return {"steps": self.steps}

    def migrate(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]
