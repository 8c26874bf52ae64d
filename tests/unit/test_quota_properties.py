"""The books against a model that is too simple to be wrong, over long random histories."""

from __future__ import annotations

import copy
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from chunkllm_bridge.common.errors import QuotaError
from chunkllm_bridge.common.quota import Counts, Lease, Ledger, PoolQuota, pages_for

OWNERS = st.sampled_from(["ada", "bob", "cy"])
UNITS = st.integers(0, 12)
LIMITS = st.none() | st.integers(0, 50)


class Refused(Exception):
    """The k-th lease of several was not to be had."""


class Books(RuleBasedStateMachine):
    """Allocate, free, abort, preempt, resize, cache, touch, evict, expire, fail and misuse, in any order.

    Cases: kvcached#262 (misses), sglang#6888 (double free), vllm#46283 and #44100 (aborts and late completions),
    LMCache#1285 (leaks over time), vllm#20302 (what counts as used).
    """

    leases: Bundle[Lease] = Bundle("leases")  # all that were ever given, closed ones too

    @initialize(total=st.integers(0, 40), limit=LIMITS)
    def opens(self, total: int, limit: int | None) -> None:
        self.now = 0.0
        self.total, self.limit, self.limits = total, limit, dict[str, int]()
        self.free, self.cached = total, 0
        self.held: dict[Lease, int] = {}  # open ones, the oldest first
        self.ledger = Ledger(total, name="kv", limit=limit, clock=lambda: self.now)

    def owned(self, owner: str) -> int:
        return sum(units for lease, units in self.held.items() if lease.owner == owner)

    def allowed(self, owner: str, units: int, *, sole: bool = False) -> bool:
        if units == 0:
            return True
        within_limits = (self.limit is None or sum(self.held.values()) + units <= self.limit) and self.owned(
            owner
        ) + units <= self.limits.get(owner, self.total)
        return units <= self.free + self.cached and (sole or within_limits)

    def take(self, units: int) -> None:
        from_free = min(units, self.free)
        self.free -= from_free
        self.cached -= units - from_free

    def drop(self, lease: Lease) -> int:
        units = self.held.pop(lease)
        self.free += units
        return units

    # -- taking

    @rule(target=leases, owner=OWNERS, units=UNITS, sole=st.booleans(), ttl=st.none() | st.integers(0, 9))
    def allocate(self, owner: str, units: int, sole: bool, ttl: int | None) -> Lease:
        expected = self.allowed(owner, units, sole=sole)
        assert expected == self.ledger.can_lease(owner, units, sole=sole)
        lease = self.ledger.lease(owner, units, sole=sole, ttl=ttl)
        assert expected == (lease is not None)
        if lease is None:
            return multiple()  # type: ignore[return-value]
        self.take(units)
        self.held[lease] = units
        return lease

    @rule(target=leases, owner=OWNERS, units=UNITS)
    def touch(self, owner: str, units: int) -> Lease:
        expected = units <= self.cached and self.allowed(owner, units)
        lease = self.ledger.touch_cached(owner, units)
        assert expected == (lease is not None)
        if lease is None:
            return multiple()  # type: ignore[return-value]
        self.cached -= units
        self.held[lease] = units
        return lease

    @rule(lease=leases, units=UNITS, sole=st.booleans())
    def grow(self, lease: Lease, units: int, sole: bool) -> None:
        if lease in self.held:
            expected = self.allowed(lease.owner, units, sole=sole)
            assert expected == lease.grow(units, sole=sole)
            if expected:
                self.take(units)
                self.held[lease] += units
        elif lease.taken:
            assert not lease.grow(units, sole=sole)
        else:
            with pytest.raises(QuotaError, match=lease.owner):
                lease.grow(units, sole=sole)

    @rule(owner=OWNERS, sizes=st.lists(UNITS, min_size=1, max_size=5))
    def fail_at_every_kth(self, owner: str, sizes: list[int]) -> None:
        for k in range(len(sizes)):
            before, owners = self.ledger.counts, set(self.ledger.owners())
            with suppress(Refused), ExitStack() as undo:
                for i, units in enumerate(sizes):
                    lease = None if i == k else self.ledger.lease(owner, units)
                    if lease is None:
                        raise Refused
                    undo.enter_context(lease)
            after = self.ledger.counts
            assert (before.held, before.available, owners) == (after.held, after.available, set(self.ledger.owners()))
            if sum(sizes) <= before.free:
                assert before == after
            assert after.cached <= before.cached  # given up on the way, and not to be had back
            self.free, self.cached = after.free, after.cached

    # -- giving back

    @rule(lease=leases, units=UNITS)
    def shrink(self, lease: Lease, units: int) -> None:
        if lease.taken:
            lease.shrink(units)
        elif units > self.held.get(lease, -1):
            with pytest.raises(QuotaError, match=lease.owner):
                lease.shrink(units)
        else:
            lease.shrink(units)
            self.held[lease] -= units
            self.free += units

    @rule(lease=leases, cache=st.booleans())
    def close(self, lease: Lease, cache: bool) -> None:
        lease.close(cache=cache)
        if lease in self.held:
            units = self.drop(lease)
            if cache:
                self.free -= units
                self.cached += units
        assert lease.closed

    @rule(lease=consumes(leases), cache=st.booleans())
    def close_twice_and_forget(self, lease: Lease, cache: bool) -> None:
        self.close(lease, cache)
        lease.close(cache=not cache)

    @rule(lease=leases, cache=st.booleans())
    def double_free(self, lease: Lease, cache: bool) -> None:
        stale = copy.copy(lease)
        if stale.closed:
            stale.close(cache=cache)
        else:
            with pytest.raises(QuotaError, match=lease.owner):
                stale.close(cache=cache)

    @rule(owner=OWNERS)
    def abort(self, owner: str) -> None:
        mine = [lease for lease in self.held if lease.owner == owner]
        assert sum(self.drop(lease) for lease in mine) == self.ledger.revoke(owner)
        assert all(lease.closed and lease.taken for lease in mine)

    @rule(units=UNITS)
    def evict(self, units: int) -> None:
        expected = min(units, self.cached)
        assert expected == self.ledger.evict(units)
        self.cached -= expected
        self.free += expected

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        due = [lease for lease in self.held if lease.deadline is not None and lease.deadline <= self.now]
        assert sum(self.drop(lease) for lease in due) == self.ledger.expire()
        assert all(lease.taken for lease in due)

    # -- limits

    @rule(limit=LIMITS)
    def resize(self, limit: int | None) -> None:
        self.limit = limit
        bound = self.total if limit is None else limit
        assert max(0, sum(self.held.values()) - bound) == self.ledger.set_limit(limit)

    @rule(owner=OWNERS, limit=LIMITS)
    def resize_owner(self, owner: str, limit: int | None) -> None:
        if limit is None:
            self.limits.pop(owner, None)
        else:
            self.limits[owner] = limit
        expected = 0 if limit is None else max(0, self.owned(owner) - limit)
        assert expected == self.ledger.set_limit(limit, owner)

    @rule(limit=st.integers(0, 40))
    def preempt(self, limit: int) -> None:
        """The caller's part after a limit was lowered: the newest owners go until the rest fits."""
        self.resize(limit)
        while self.ledger.excess:
            self.abort(self.ledger.owners()[-1])
        assert self.ledger.counts.held <= limit

    # -- always

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        held = sum(self.held.values())
        assert Counts(total=self.total, held=held, cached=self.cached, free=self.free) == self.ledger.counts
        assert self.ledger.counts.conserved
        assert {lease.owner for lease in self.held} == set(self.ledger.owners())
        for owner in ("ada", "bob", "cy"):
            assert self.owned(owner) == self.ledger.held_by(owner)
        assert all(lease.units == units and not lease.closed for lease, units in self.held.items())
        self.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            for owner in self.ledger.owners():
                self.ledger.revoke(owner)
            assert self.total == self.ledger.counts.available


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("drafts", [1, 4, 64])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), prompt=st.integers(1, 600))
def test_pages_are_rounded_once(page_size: int, drafts: int, data: st.DataObject, prompt: int) -> None:
    """Rejected drafts give their pages back, whatever the page size: no page leaks (sglang#27789)."""
    accepted = data.draw(st.lists(st.integers(0, drafts), max_size=20))
    ledger = Ledger(4096, name="kv")
    lease = ledger.lease("r", pages_for(prompt, page_size))
    assert lease is not None
    tokens = prompt
    for kept in accepted:
        wanted = pages_for(tokens + drafts + 1, page_size)
        assert lease.grow(wanted - lease.units)
        tokens += kept + 1
        lease.shrink(lease.units - pages_for(tokens, page_size))
        assert (lease.units - 1) * page_size < tokens <= lease.units * page_size
    lease.close()

    assert ledger.total == ledger.counts.free


@given(
    total=st.integers(1, 60),
    history=st.lists(
        st.tuples(st.just("take") | st.just("give"), st.integers(0, 20))
        | st.tuples(st.just("limit"), st.none() | st.integers(-5, 80)),
        max_size=60,
    ),
)
def test_an_engine_that_sees_less_holds_less(total: int, history: list[tuple[str, int | None]]) -> None:
    """With the reserve hidden, an engine's own pool never grows beyond the limit, whenever that changes."""
    quota, held, allowed = PoolQuota(total), 0, True
    for verb, number in history:
        if verb == "limit":
            quota.set_limit(number)
            assert 1 <= quota.limit <= total
            allowed = held <= quota.limit
        elif verb == "give":
            held -= min(held, number or 0)
        elif (number or 0) <= quota.hidden_free(total - held):
            held += number or 0
        allowed = allowed or held <= quota.limit
        violations = quota.violations
        quota.observe(held, sole=False)
        assert allowed == (quota.violations == violations)
        assert quota.excess(held) == max(0, held - quota.limit)
    assert 0 <= held <= total
    assert quota.peak <= quota.peak_ever <= total
