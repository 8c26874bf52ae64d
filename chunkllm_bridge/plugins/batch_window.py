"""Hold the first new prefill for a moment, so that more requests are prefilled with it."""

from __future__ import annotations

import attrs

from chunkllm_bridge import BatchingPlan, BatchingStep, Plugin, PluginSpec, Preparation, Seam


@attrs.frozen(kw_only=True)
class Config:
    window: float | None = attrs.field(  # seconds
        default=None,
        validator=attrs.validators.optional([attrs.validators.ge(0), attrs.validators.lt(60)]),
        metadata={"parameter": "plugin.batch_window"},
    )


class BatchWindow(Plugin):
    spec = PluginSpec(
        name="batch_window",
        version="1.0",
        abi=(1, 0),
        seams={Seam.BATCHING},
        requires={"batch.window"},
        summary="holds new prefills for plugin.batch_window, never decodes",
    )
    Config = Config

    def prepare(self, preparation: Preparation) -> None:
        self._plan = None if self.config.window is None else BatchingPlan(hold_until=self.config.window)

    def plan_batching(self, step: BatchingStep) -> BatchingPlan | None:
        full = step.new_waiting >= step.slots or step.waiting_tokens >= step.budget_tokens
        return None if full or not step.arrivals_possible else self._plan
