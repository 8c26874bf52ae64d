"""What the bridge adds to one scheduler step, without an engine: `pytest bench --benchmark-only`."""

from __future__ import annotations

from typing import Any

import pytest

from chunkllm_bridge import BatchingStep, BlocksPlan, BlocksStep, Plugin, PluginSpec, Seam
from chunkllm_bridge.common.testing import FakeEngine, attach

BLOCKS = BlocksStep(index=1, total=1000, held=400, available=600, running=8, waiting=2)
BATCHING = BatchingStep(
    index=1,
    new_waiting=2,
    running=8,
    slots=8,
    waiting_tokens=64,
    budget_tokens=2048,
    oldest_wait=0.001,
    arrivals_possible=True,
)


def capping(number: int) -> type[Plugin]:
    class Cap(Plugin):
        spec = PluginSpec(name=f"cap{number}", version="1", abi=(1, 0), seams={Seam.BLOCKS})

        def plan_blocks(self, step: BlocksStep) -> BlocksPlan:
            return BlocksPlan(limit=500 + number)

    return Cap


@pytest.mark.parametrize("plugins", [0, 1, 10])
def test_block_limit(benchmark: Any, plugins: int) -> None:
    """Asking every BLOCKS plugin for its limit: microseconds each, in a step of tens of milliseconds."""
    settings = {f"plugins.cap{number}.priority": 50 for number in range(plugins)}
    with attach(FakeEngine(), settings, *map(capping, range(plugins))) as bridge:
        limit = benchmark(bridge.host.block_limit, BLOCKS)

    assert (500 if plugins else None) == limit


def test_hold(benchmark: Any) -> None:
    """Asking whether the waiting prefills are held."""
    with attach(FakeEngine(), {"plugin.batch_window": "10ms"}) as bridge:
        assert benchmark(bridge.host.hold, BATCHING)
