"""Who may hold how much: one promise after the other."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import attrs
import pytest

from chunkllm_bridge.common.errors import QuotaError
from chunkllm_bridge.common.quota import Counts, Lease, Ledger, PoolQuota, Verdict, pages_for


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def leased(ledger: Ledger, owner: str, units: int) -> Lease:
    lease = ledger.lease(owner, units)
    assert lease is not None
    return lease


def counts(*, held: int = 0, cached: int = 0, free: int = 0) -> Counts:
    return Counts(total=held + cached + free, held=held, cached=cached, free=free)


class TestLeasing:
    def test_refusal_is_an_answer(self) -> None:
        """What cannot be had is None, and nothing is taken."""
        ledger = Ledger(10, name="kv", limit=6, owner_limits={"guest": 2})

        assert ledger.lease("guest", 3) is None
        assert ledger.lease("host", 7) is None
        assert counts(free=10) == ledger.counts
        assert () == ledger.owners()

    def test_limits_stack(self) -> None:
        """An owner is bound by its own limit and by everybody's, whichever is tighter."""
        ledger = Ledger(10, name="kv", limit=6, owner_limits={"guest": 4})
        leased(ledger, "host", 3)

        assert not ledger.can_lease("guest", 4)
        assert ledger.can_lease("guest", 3)

    def test_cache_gives_way(self) -> None:
        """A lease takes free units first and evicts only what is missing."""
        ledger = Ledger(10, name="kv")
        leased(ledger, "a", 6).close(cache=True)

        leased(ledger, "b", 5)

        assert counts(held=5, cached=5) == ledger.counts

    def test_a_refused_lease_evicts_nothing(self) -> None:
        """The cache is not spent on what is refused anyway."""
        ledger = Ledger(10, name="kv")
        leased(ledger, "a", 8).close(cache=True)
        leased(ledger, "b", 2)

        assert ledger.lease("c", 9) is None
        assert counts(held=2, cached=8) == ledger.counts

    def test_prefix_hit(self) -> None:
        """Cached units can be leased as they are; the free ones are left alone, and limits hold."""
        ledger = Ledger(10, name="kv", limit=5)
        leased(ledger, "a", 4).close(cache=True)

        assert ledger.touch_cached("b", 5) is None
        lease = ledger.touch_cached("b", 3)

        assert lease is not None
        assert counts(held=3, cached=1, free=6) == ledger.counts
        ledger.set_limit(3)
        assert ledger.touch_cached("b", 1) is None

    def test_growing_is_all_or_nothing(self) -> None:
        ledger = Ledger(10, name="kv", limit=8)
        lease = leased(ledger, "a", 4)

        assert not lease.grow(5)
        assert 4 == lease.units
        assert lease.grow(4)
        assert 8 == lease.units == ledger.held_by("a")

    def test_zero_units_are_always_granted(self) -> None:
        """A decode step that needs no new block goes on, even while the pool is over its limit."""
        ledger = Ledger(10, name="kv")
        lease = leased(ledger, "a", 10)
        ledger.set_limit(1)

        assert lease.grow(0)
        assert not lease.grow(1)
        assert ledger.lease("b", 0) is not None

    def test_progress_rule(self) -> None:
        """Who runs alone may pass every limit, never the total."""
        ledger = Ledger(10, name="kv", limit=2, owner_limits={"a": 1})

        lease = ledger.lease("a", 5, sole=True)

        assert lease is not None
        assert lease.grow(5, sole=True)
        assert not lease.grow(1, sole=True)
        assert 8 == ledger.excess

    def test_with(self) -> None:
        ledger = Ledger(10, name="kv")

        with leased(ledger, "a", 4):
            assert 4 == ledger.held_by("a")

        assert counts(free=10) == ledger.counts

    def test_owners_come_in_the_order_of_their_first_lease(self) -> None:
        """So the newest can be preempted first."""
        ledger = Ledger(10, name="kv")
        for owner in ("b", "a", "b", "c"):
            leased(ledger, owner, 1)

        assert ("b", "a", "c") == ledger.owners()

    def test_negative_units_are_a_mistake(self) -> None:
        """A negative lease would be a way to mint units."""
        ledger = Ledger(10, name="kv")
        lease = leased(ledger, "a", 4)
        for ask in (
            lambda: ledger.lease("a", -1),
            lambda: ledger.can_lease("a", -1),
            lambda: ledger.touch_cached("a", -1),
            lambda: lease.grow(-1),
            lambda: lease.shrink(-1),
            lambda: ledger.set_limit(-1, "a"),
            lambda: Ledger(1, name="kv", owner_limits={"a": -1}),
        ):
            with pytest.raises(QuotaError, match="kv: -1 units for a"):
                ask()
        for ask in (lambda: ledger.evict(-1), lambda: ledger.set_limit(-1), lambda: Ledger(-1, name="kv")):
            with pytest.raises(QuotaError, match="kv: -1 units for"):
                ask()

        assert counts(held=4, free=6) == ledger.counts


class TestMisuse:
    def test_closing_again_is_harmless(self) -> None:
        """`close` is idempotent: sglang#6888 had 3,189,424 available of 3,185,200."""
        ledger = Ledger(10, name="kv")
        lease = leased(ledger, "a", 4)

        lease.close()
        lease.close(cache=True)

        assert lease.closed
        assert not lease.taken
        assert counts(free=10) == ledger.counts

    def test_double_free_names_the_owner(self) -> None:
        """A copy of a handle frees nothing: error naming the owner, books unchanged (sglang#6888)."""
        ledger = Ledger(10, name="kv")
        lease = leased(ledger, "req-7", 4)
        stale = copy.copy(lease)
        leased(ledger, "req-8", 1)
        lease.close()

        for use in (stale.close, lambda: stale.shrink(1), lambda: stale.grow(1)):
            with pytest.raises(QuotaError, match="kv: req-7 uses a lease that is not open"):
                use()

        assert counts(held=1, free=9) == ledger.counts
        ledger.check()

    def test_using_what_one_closed(self) -> None:
        ledger = Ledger(10, name="kv")
        lease = leased(ledger, "req-7", 4)
        lease.close()

        with pytest.raises(QuotaError, match="req-7"):
            lease.grow(1)
        with pytest.raises(QuotaError, match="req-7"):
            lease.shrink(0)
        assert counts(free=10) == ledger.counts

    def test_a_lease_of_another_ledger(self) -> None:
        """Equal owners, other books."""
        one, other = Ledger(10, name="one"), Ledger(10, name="other")
        lease = leased(one, "a", 4)
        leased(other, "a", 4)
        lease._ledger = other

        with pytest.raises(QuotaError, match="other: a uses"):
            lease.close()
        assert counts(held=4, free=6) == other.counts

    def test_giving_back_more_than_one_holds(self) -> None:
        """Over-shrink: error naming the owner, books unchanged (sglang#6888)."""
        ledger = Ledger(10, name="kv")
        leased(ledger, "other", 3)
        lease = leased(ledger, "req-7", 4)

        with pytest.raises(QuotaError, match="kv: req-7 gives back 5 of the 4 that it holds"):
            lease.shrink(5)
        assert counts(held=7, free=3) == ledger.counts

    @pytest.mark.parametrize(
        ("cook", "complaint"),
        [
            (lambda ledger, lease: setattr(lease, "units", 3), "kv: req-7 holds 3 by the leases, 4 by the books"),
            (lambda ledger, lease: ledger.__dict__.update(_held=5), r"everybody \(req-7\) holds 4 by the leases, 5"),
            (lambda ledger, lease: ledger.__dict__.update(_free=7), "free .* is not the total: .*free=7"),
            (lambda ledger, lease: ledger.__dict__.update(_free=7, _cached=-1), "cached=-1"),
        ],
    )
    def test_check_finds_cooked_books(self, cook: Callable[[Ledger, Lease], object], complaint: str) -> None:
        """`check` recounts from the leases and says who is off."""
        ledger = Ledger(10, name="kv")
        lease = leased(ledger, "req-7", 4)
        ledger.check()

        cook(ledger, lease)

        with pytest.raises(QuotaError, match=complaint):
            ledger.check()


class TestTakingBack:
    def test_abort(self) -> None:
        """All leases of one owner go, nobody else's; its late calls are harmless (vllm#46283, #46289)."""
        ledger = Ledger(10, name="kv")
        first, second, other = leased(ledger, "a", 1), leased(ledger, "a", 2), leased(ledger, "b", 3)

        assert 3 == ledger.revoke("a")
        assert 0 == ledger.revoke("a")

        assert first.taken
        assert not second.grow(1)
        second.shrink(1)
        second.close(cache=True)
        assert not other.closed
        assert counts(held=3, free=7) == ledger.counts

    @pytest.mark.parametrize("completion", ["late", "never"])
    @pytest.mark.parametrize("state", ["leased", "grown", "shrunk", "overdrawn"])
    def test_a_lost_completion_costs_no_more_than_its_ttl(self, state: str, completion: str) -> None:
        """A client aborts while a load is in flight (vllm#46283, #46289, vllm-ascend#16662, #16663)."""
        clock = Clock()
        ledger = Ledger(10, name="kv", limit=6, clock=clock)
        lease = ledger.lease("load", 4, ttl=30)
        assert lease is not None
        match state:
            case "grown":
                assert lease.grow(2)
            case "shrunk":
                lease.shrink(1)
            case "overdrawn":
                assert lease.grow(6, sole=True)
        held = lease.units

        clock.now = 29.9
        assert 0 == ledger.expire()
        clock.now = 30
        assert held == ledger.expire()
        assert counts(free=10) == ledger.counts

        leased(ledger, "next", 5)
        if completion == "late":
            assert not lease.grow(1)
            lease.close(cache=True)
        assert counts(held=5, free=5) == ledger.counts
        ledger.check()

    def test_expire_at_a_given_time(self) -> None:
        """Leases without a deadline stay."""
        ledger = Ledger(10, name="kv", clock=Clock())
        leased(ledger, "a", 1)
        assert ledger.lease("a", 2, ttl=5) is not None
        assert ledger.lease("a", 4, ttl=50) is not None

        assert 2 == ledger.expire(now=5)
        assert 5 == ledger.held_by("a")

    @pytest.mark.parametrize("way", ["finish", "fail", "abort", "refuse", "abort-first", "expire", "finish-abort"])
    def test_every_way_out_leaves_nothing(self, way: str) -> None:
        """Cleanup happens once on each exit path, also when a request goes before it had anything (vllm#44100)."""
        ledger = Ledger(10, name="kv", clock=Clock())
        match way:
            case "finish":
                leased(ledger, "r", 4).close()
            case "fail":
                with suppress(RuntimeError), leased(ledger, "r", 4):
                    raise RuntimeError
            case "abort":
                lease = leased(ledger, "r", 4)
                assert 4 == ledger.revoke("r")
                lease.close()
            case "refuse":
                assert ledger.lease("r", 11) is None
            case "abort-first":
                assert 0 == ledger.revoke("r")
            case "expire":
                assert ledger.lease("r", 4, ttl=0) is not None
                assert 4 == ledger.expire()
            case "finish-abort":
                leased(ledger, "r", 4).close()
                assert 0 == ledger.revoke("r")

        assert counts(free=10) == ledger.counts
        assert () == ledger.owners()
        assert 0 == ledger.held_by("r")
        ledger.check()


class TestLimits:
    def test_lowering_takes_from_nobody(self) -> None:
        """It answers with what must be won back, and lets nothing in until then."""
        ledger = Ledger(10, name="kv")
        leased(ledger, "a", 4)
        leased(ledger, "b", 4)

        assert 3 == ledger.set_limit(5)
        assert 8 == ledger.counts.held
        assert not ledger.can_lease("c", 1)
        ledger.revoke("b")
        assert 0 == ledger.excess
        assert ledger.can_lease("c", 1)

    def test_raising_and_lifting(self) -> None:
        ledger = Ledger(10, name="kv", limit=1)

        assert 0 == ledger.set_limit(3)
        assert (True, False) == (ledger.can_lease("a", 3), ledger.can_lease("a", 4))
        assert 0 == ledger.set_limit(None)
        assert 10 == ledger.limit
        assert ledger.can_lease("a", 10)
        ledger.set_limit(99)
        assert 10 == ledger.limit
        assert not ledger.can_lease("a", 11)

    def test_one_owner(self) -> None:
        ledger = Ledger(10, name="kv")
        leased(ledger, "a", 4)

        assert 3 == ledger.set_limit(1, "a")
        assert (False, True) == (ledger.can_lease("a", 1), ledger.can_lease("b", 6))
        assert 0 == ledger.set_limit(None, "a")
        assert ledger.can_lease("a", 6)
        assert 0 == ledger.set_limit(None, "stranger")


class TestCounting:
    @pytest.mark.parametrize(
        ("state", "usage"),
        [
            (counts(free=8), 0.0),
            (counts(held=2, free=6), 0.25),
            (counts(cached=2, free=6), 0.0),
            (counts(held=2, cached=6), 0.25),
            (counts(held=8), 1.0),
        ],
    )
    def test_usage_is_what_is_held(self, state: Counts, usage: float) -> None:
        """Evictable cache is no usage (vllm#20302): five states against the oracle."""
        ledger = Ledger(8, name="kv")
        hold, keep = leased(ledger, "a", state.held), leased(ledger, "b", state.cached)
        keep.close(cache=True)

        assert state == ledger.counts
        assert usage == ledger.counts.usage
        assert 8 - state.held == ledger.counts.available
        assert ledger.counts.conserved
        hold.close()

    def test_an_empty_pool(self) -> None:
        ledger = Ledger(0, name="none")

        assert ledger.lease("a", 1, sole=True) is None
        assert ledger.lease("a", 0) is not None
        assert 0.0 == ledger.counts.usage

    def test_not_conserved(self) -> None:
        assert not attrs.evolve(counts(held=2, free=2), free=3).conserved
        assert not counts(held=-1, free=3).conserved

    def test_evicting(self) -> None:
        ledger = Ledger(10, name="kv")
        leased(ledger, "a", 4).close(cache=True)

        assert 3 == ledger.evict(3)
        assert 1 == ledger.evict(3)
        assert counts(free=10) == ledger.counts

    def test_on_change_tells_every_change_in_order(self) -> None:
        """It may read the ledger that calls it."""
        seen: list[int] = []
        ledger = Ledger(10, name="kv", on_change=lambda now: seen.append(now.held + 100 * (now == ledger.counts)))
        lease = leased(ledger, "a", 4)
        lease.grow(2)
        lease.shrink(1)
        ledger.lease("b", 11)
        lease.close()

        assert [104, 106, 105, 100] == seen


class TestThreads:
    def test_theft_between_asking_and_leasing(self) -> None:
        """71 free, 76 needed: a miss, not the end of the engine (kvcached#262, #301, #453)."""
        ledger = Ledger(76, name="kv")
        assert ledger.can_lease("victim", 76)

        thief = threading.Thread(target=ledger.lease, args=("thief", 5))
        thief.start()
        thief.join()

        assert ledger.lease("victim", 76) is None
        assert counts(held=5, free=71) == ledger.counts
        assert ledger.lease("victim", 71) is not None

    def test_one_change_at_a_time(self) -> None:
        """Nobody gets in while a change is under way, here held up by `on_change` (kvcached#262)."""
        waited: list[bool] = []

        def intrude(_: Counts) -> None:
            if not waited:
                waited.append(False)
                thief.start()
                thief.join(0.05)
                waited.append(thief.is_alive())

        ledger = Ledger(10, name="kv", on_change=intrude)
        thief = threading.Thread(target=ledger.lease, args=("thief", 6))
        leased(ledger, "first", 6)
        thief.join()

        assert [False, True] == waited
        assert counts(held=6, free=4) == ledger.counts

    @pytest.fixture
    def _eager_switching(self) -> Iterator[None]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(before)

    @pytest.mark.usefixtures("_eager_switching")
    def test_many_at_once(self) -> None:
        """Nothing is lost, minted or leased beyond the limit while four threads ask, take and give back."""
        over: list[Counts] = []
        ledger = Ledger(40, name="kv", limit=20, on_change=lambda now: over.append(now) if now.held > 20 else None)
        start = threading.Barrier(4)

        def work(owner: str) -> None:
            dice = random.Random(owner)
            start.wait()
            for _ in range(500):
                if ledger.can_lease(owner, 9) and (lease := ledger.lease(owner, dice.randrange(10))):
                    lease.grow(dice.randrange(5))
                    lease.close(cache=dice.random() < 0.5)
                ledger.evict(dice.randrange(3))

        threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        ledger.check()
        assert [] == over
        assert (0, 40) == (ledger.counts.held, ledger.counts.available)


class TestOverTime:
    @pytest.mark.parametrize("failing", range(6))
    def test_failure_at_every_unit(self, failing: int) -> None:
        """Six leases or none: when the k-th fails, the ledger is as before (kvcached#262)."""
        ledger = Ledger(10, name="kv")
        leased(ledger, "a", 2)
        before = ledger.counts

        with suppress(MemoryError), ExitStack() as undo:
            for unit in range(6):
                if unit == failing:
                    raise MemoryError
                undo.enter_context(leased(ledger, "b", 1))

        assert before == ledger.counts
        assert ("a",) == ledger.owners()

    def test_no_leak_and_no_fragmentation_in_100_000_operations(self) -> None:
        """What is available can always be had in one piece, after any history (LMCache#1285, #955, #1034)."""
        dice = random.Random(1285)
        ledger = Ledger(1_000, name="kv")
        open_leases: list[Lease] = []
        for operation in range(100_000):
            size = dice.randrange(1, 60)
            available = ledger.counts.available
            lease = ledger.lease(f"r{operation % 50}", size)
            assert (lease is not None) == (size <= available)
            if lease is not None:
                open_leases.append(lease)
            elif dice.random() < 0.5:
                ledger.revoke(f"r{dice.randrange(50)}")
            else:
                open_leases.pop(dice.randrange(len(open_leases))).close(cache=dice.random() < 0.3)
        ledger.check()
        for lease in open_leases:
            lease.close()

        assert (0, 1_000) == (ledger.counts.held, ledger.counts.available)
        assert ledger.lease("all", 1_000) is not None

    def test_bytes_held_stay_within_their_bound(self) -> None:
        """2,500 requests of 16 to 256 tokens, some of which vanish: bounded by bytes, idle at none (kvcached#359)."""
        page_size, page_bytes = 16, 4096
        bound = 64 * page_bytes
        dice = random.Random(359)
        clock = Clock()
        peak = 0

        def watch(now: Counts) -> None:
            nonlocal peak
            peak = max(peak, now.held)

        ledger = Ledger(100 * page_bytes, name="kv", limit=bound, on_change=watch, clock=clock)
        running: deque[Lease] = deque()
        for request in range(2_500):
            size = pages_for(dice.randint(16, 256), page_size) * page_bytes
            while (lease := ledger.lease(f"r{request}", size, ttl=60)) is None:
                clock.now += 1
                if running:
                    running.popleft().close()
                ledger.expire()
            if request % 100 != 99:  # the others are never heard of again
                running.append(lease)
        for lease in running:
            lease.close()

        assert bound // 2 < peak <= bound
        assert ledger.counts.held > 0
        clock.now += 60
        ledger.expire()
        assert counts(free=100 * page_bytes) == ledger.counts


class TestPoolQuota:
    def test_unlimited(self) -> None:
        """Off means off: nothing is hidden and nothing is counted against anybody."""
        quota = PoolQuota(100)

        assert (100, 0, 37) == (quota.limit, quota.reserve(), quota.hidden_free(37))
        assert Verdict(admitted=False, overdraft=False) == quota.judge(granted=False, sole=True)
        assert (0, 0) == (quota.denied, quota.overdrafts)

    @pytest.mark.parametrize(("asked", "limit"), [(40, 40), (0, 1), (-5, 1), (1000, 100), (None, 100)])
    def test_limit_is_clamped(self, asked: int | None, limit: int) -> None:
        """At least one unit, at most the pool."""
        quota = PoolQuota(100)
        quota.set_limit(asked)

        assert (limit, 100 - limit) == (quota.limit, quota.reserve())

    def test_a_pool_of_nothing(self) -> None:
        with pytest.raises(QuotaError, match="0 units"):
            PoolQuota(0)

    @pytest.mark.parametrize(("held", "seen"), [(0, 40), (39, 1), (40, 0), (70, 0)])
    def test_hides_the_reserve(self, held: int, seen: int) -> None:
        """The engine sees what is left of the limit, and never less than nothing."""
        quota = PoolQuota(100)
        quota.set_limit(40)

        assert seen == quota.hidden_free(100 - held)
        assert max(0, held - 40) == quota.excess(held)

    @pytest.mark.parametrize(
        ("granted", "sole", "verdict", "denied", "overdrafts"),
        [
            (True, False, Verdict(admitted=True, overdraft=False), 0, 0),
            (True, True, Verdict(admitted=True, overdraft=False), 0, 0),
            (False, True, Verdict(admitted=True, overdraft=True), 0, 1),
            (False, False, Verdict(admitted=False, overdraft=False), 1, 0),
        ],
    )
    def test_judging(self, granted: bool, sole: bool, verdict: Verdict, denied: int, overdrafts: int) -> None:
        """A short quota lets a request wait, unless it runs alone and would wait for ever."""
        quota = PoolQuota(100)
        quota.set_limit(40)

        assert verdict == quota.judge(granted=granted, sole=sole)
        assert (denied, overdrafts) == (quota.denied, quota.overdrafts)

    def test_remembers_peaks_and_violations(self) -> None:
        """A sole request above the limit is the progress rule at work; anything else above it is a violation."""
        quota = PoolQuota(100)
        quota.observe(80, sole=False)
        quota.set_limit(40)
        quota.observe(30, sole=False)
        quota.set_limit(40)  # the same: not a change
        quota.observe(20, sole=False)
        quota.observe(60, sole=True)
        quota.observe(41, sole=False)
        quota.note_preempted(2)

        assert {
            "total": 100,
            "limit": 40,
            "denied": 0,
            "overdrafts": 0,
            "preempted": 2,
            "peak": 60,
            "peak_ever": 80,
            "violations": 1,
        } == quota.as_dict()
