"""What a spec says of the engine's KV pool, at start and while serving."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.common.pool import (
    allowed_reasons,
    check_ratio,
    check_shares,
    layer_reasons,
    pool_share,
    pool_status,
    ratio_bytes,
)
from chunkllm_bridge.common.quota import Counts, PoolQuota
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.common.testing import FakeCatalogue, FakeEngine, spec_for

ABOUT = attrs.evolve(
    FakeEngine().info, device_memory=1_000_000, block_size=16, block_bytes=1_000, total_blocks=99, rank=0
)


def spec(**values: Any) -> Spec:
    """`kv_cache__memory_ratio` is `kv_cache.memory_ratio`."""
    return spec_for(FakeEngine(), {key.replace("__", "."): value for key, value in values.items()}, FakeCatalogue())


def test_the_ratio_in_bytes() -> None:
    """Of the memory that one rank counts as its own; without a ratio the engine decides."""
    assert 250_000 == ratio_bytes(spec(kv_cache__memory_ratio=0.25), ABOUT)
    assert ratio_bytes(spec(kv_cache__memory_ratio="engine"), ABOUT) is None


class TestAtStart:
    def test_shares_that_are_more_than_all_are_spelled_out(self) -> None:
        """The weights count too."""
        check_shares(spec(kv_cache__memory_ratio=0.5), ABOUT, 500_000, off=())
        with pytest.raises(IncompatibleError, match=r"weights 0.60 \+ kv_cache.memory_ratio 0.50 = 1.10"):
            check_shares(spec(kv_cache__memory_ratio=0.5), ABOUT, 600_000, off=())

    def test_a_plugin_that_is_off_needs_no_share(self) -> None:
        wanted = spec(kv_cache__memory_ratio=0.5, plugins__batch_window__memory_ratio=0.4)

        check_shares(wanted, ABOUT, 200_000, off=("batch_window",))
        with pytest.raises(IncompatibleError, match=r"plugins.batch_window.memory_ratio 0.40 = 1.10"):
            check_shares(wanted, ABOUT, 200_000, off=())

    def test_a_layer_that_is_too_large(self) -> None:
        """The largest is named, how many there are, and the ratio that would fit."""
        sizes = {"a": 10_000, "b": 40_000, "c": 20_000}
        (reason,) = layer_reasons(sizes, 70_000, spec(kv_cache__max_layer_bytes=16_000), ABOUT)

        for part in ("2 of 3 layers", "b 40000 bytes", "kv_cache.memory_ratio = 0.0280 would fit"):
            assert part in reason
        assert [] == layer_reasons(sizes, 70_000, spec(kv_cache__max_layer_bytes=40_000), ABOUT)

    def test_a_pool_beyond_the_ratio(self) -> None:
        """Says what may have made it so, in the engine's own words."""
        (reason,) = allowed_reasons(200_000, spec(kv_cache__memory_ratio=0.1), ABOUT, "--blocks?")

        assert "kv_cache.memory_ratio = 0.1 allows 100000 bytes" in reason
        assert "make 200000 (--blocks?)" in reason
        assert [] == allowed_reasons(100_000, spec(kv_cache__memory_ratio=0.1), ABOUT, "")
        assert [] == allowed_reasons(10**9, spec(kv_cache__memory_ratio="engine"), ABOUT, "")


class TestWhileServing:
    def test_a_quota_cannot_outgrow_the_pool(self) -> None:
        """As much as the whole pool is one; a block more is refused, and needs a restart."""
        check_ratio(spec(kv_cache__memory_ratio=0.1), ABOUT)
        check_ratio(spec(kv_cache__memory_ratio="engine"), ABOUT)
        with pytest.raises(ControlError, match=r"the pool made at start is 0.1000 of the memory \(99 blocks\)") as no:
            check_ratio(spec(kv_cache__memory_ratio=0.101), ABOUT)

        assert 409 == no.value.status
        assert 0.1 == pool_share(ABOUT)

    def test_the_status_says_all_that_people_ask_for(self) -> None:
        """What is held and under which limit, the size of a block, the ratio in force and the largest one."""
        quota = PoolQuota(99)
        quota.set_limit(40)
        counts = Counts(total=99, held=30, cached=9, free=60)
        kv = pool_status(counts, quota, ABOUT, spec(kv_cache__memory_ratio=0.04), holds=2, steps=7)

        assert (99, 30, 9, 60, 40) == tuple(kv[key] for key in ("total", "held", "cached", "free", "limit"))
        assert (True, 16, 1_000) == (kv["conserved"], kv["block_size"], kv["block_bytes"])
        assert (0.04, 0.1) == (kv["memory_ratio"], kv["memory_ratio_max"])
        assert (2, 7) == (kv["window_holds"], kv["steps"])
