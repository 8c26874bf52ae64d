"""Who may hold how much, under which limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

import attrs

from .errors import QuotaError


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` fill. Round a request's total here, once; never add up rounded parts."""
    return -(-tokens // page_size)


@attrs.frozen(kw_only=True)
class Counts:
    """One consistent reading of a pool."""

    total: int
    held: int  # set aside for somebody by an open lease
    cached: int  # worth keeping, held by nobody: given up when others need it
    free: int  # neither held nor cached

    @property
    def available(self) -> int:
        """What could be leased if no limit stood in the way."""
        return self.free + self.cached

    @property
    def usage(self) -> float:
        """The held share of the pool. A cache that nobody holds is no usage."""
        return self.held / self.total if self.total else 0.0

    @property
    def conserved(self) -> bool:
        return min(self.free, self.held, self.cached) >= 0 and self.free + self.held + self.cached == self.total


class Lease:
    """Units set aside for one owner until closed. Made by a `Ledger` only.

    A lease can also be taken back, by `Ledger.revoke` or `Ledger.expire`. Its holder cannot have known, so a late call
    is harmless: `grow` answers False, `shrink` and `close` do nothing.
    """

    __slots__ = ("_ledger", "closed", "deadline", "owner", "taken", "units")

    def __init__(self, ledger: Ledger, owner: str, deadline: float | None) -> None:
        self._ledger = ledger
        self.owner = owner
        self.deadline = deadline  # on the ledger's clock; None: until closed
        self.units = 0
        self.closed = False
        self.taken = False  # closed by somebody else than its holder

    def grow(self, units: int, *, sole: bool = False) -> bool:
        """Add all of `units`, or none and answer False."""
        return self._ledger._grow(self, units, sole=sole)

    def shrink(self, units: int) -> None:
        self._ledger._shrink(self, units)

    def close(self, *, cache: bool = False) -> None:
        """Give everything back, as free units or, with `cache`, as units worth keeping. Safe to call again."""
        self._ledger._close(self, cache=cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "taken" if self.taken else "closed" if self.closed else f"units={self.units}"
        return f"<Lease of {self.owner!r} on {self._ledger.name!r}: {state}>"


class Ledger:
    """The books of one pool of fungible units; a unit is whatever its owner counts in (blocks, bytes).

    Refusals are answers (`None`, `False`), misuse is a `QuotaError` that names the owner and leaves the books alone.
    Limits bind what is held; the cache lives in what is left of the total. Safe to use from several threads.
    `on_change` is called with the lock held, so in order: keep it short, and it must not raise.
    """

    def __init__(
        self,
        total: int,
        *,
        name: str,
        limit: int | None = None,
        owner_limits: Mapping[str, int] | None = None,
        on_change: Callable[[Counts], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.name = name
        self._limit: int | None = None
        self._owner_limits: dict[str, int] = {}
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.RLock()  # re-entrant: `on_change` may read the ledger
        self._free = total  # counted beside held and cached, not derived from them: `check` compares
        self._cached = 0
        self._held = 0
        self._held_by: dict[str, int] = {}
        self._leases: dict[str, set[Lease]] = {}  # open ones by owner, the oldest owner first
        self._refuse_negative(total, "the pool")
        self.set_limit(limit)
        for owner, most in (owner_limits or {}).items():
            self.set_limit(most, owner)

    # -- asking

    @property
    def counts(self) -> Counts:
        with self._lock:
            return Counts(total=self.total, held=self._held, cached=self._cached, free=self._free)

    @property
    def limit(self) -> int:
        """The limit on what all owners hold together; the total when there is none."""
        return self.total if self._limit is None else min(self._limit, self.total)

    @property
    def excess(self) -> int:
        """By how much the holders are over the limit: after it was lowered, or by an overdraft."""
        return max(0, self._held - self.limit)

    def held_by(self, owner: str) -> int:
        return self._held_by.get(owner, 0)

    def owners(self) -> tuple[str, ...]:
        """Everybody with an open lease, the oldest first."""
        with self._lock:
            return tuple(self._leases)

    def can_lease(self, owner: str, units: int, *, sole: bool = False) -> bool:
        """Advice, not a promise: somebody may come in between, and then `lease` answers None."""
        self._refuse_negative(units, owner)
        with self._lock:
            return units <= self._room(owner, sole=sole)

    def check(self) -> None:
        """Recount from the leases."""
        with self._lock:
            for owner, leases in self._leases.items():
                self._compare(owner, (lease.units for lease in leases), self._held_by[owner])
            self._compare(f"everybody ({', '.join(self._leases)})", self._held_by.values(), self._held)
            if not self.counts.conserved:
                raise QuotaError(f"{self.name}: free + held + cached is not the total: {self.counts}")

    # -- taking and giving back

    def lease(self, owner: str, units: int, *, sole: bool = False, ttl: float | None = None) -> Lease | None:
        """Set `units` aside, giving up cached ones as needed; None when they cannot be had.

        `sole` is the progress rule: whoever runs alone may go beyond the limits, not beyond the total, because waiting
        would be for ever. After `ttl` seconds `expire` takes the lease back.
        """
        self._refuse_negative(units, owner)
        with self._lock:
            if units > self._room(owner, sole=sole):
                return None
            return self._open(owner, units, from_cache=max(0, units - self._free), ttl=ttl)

    def touch_cached(self, owner: str, units: int) -> Lease | None:
        """Lease units that are cached already (a prefix hit); None when so many are not there or not allowed."""
        self._refuse_negative(units, owner)
        with self._lock:
            if units > min(self._cached, self._room(owner, sole=False)):
                return None
            return self._open(owner, units, from_cache=units, ttl=None)

    def revoke(self, owner: str) -> int:
        """Take back all that an owner has leased, whatever it was doing; how many units that was."""
        with self._lock:
            return self._take_back(self._leases.get(owner, ()))

    def expire(self, now: float | None = None) -> int:
        """Take back every lease whose deadline has come; how many units that was."""
        with self._lock:
            now = self._clock() if now is None else now
            every = (lease for leases in self._leases.values() for lease in leases)
            return self._take_back(lease for lease in every if lease.deadline is not None and lease.deadline <= now)

    def evict(self, units: int) -> int:
        """Turn up to `units` cached ones into free ones; how many there were."""
        self._refuse_negative(units, "the cache")
        with self._lock:
            evicted = min(units, self._cached)
            self._cached -= evicted
            self._free += evicted
            self._changed()
            return evicted

    def set_limit(self, limit: int | None, owner: str | None = None) -> int:
        """Change the limit of everybody or of one owner; what is now held beyond it, for the caller to win back.

        Holders are left alone: only the caller knows whom to preempt.
        """
        self._refuse_negative(limit or 0, owner or "everybody")
        with self._lock:
            if owner is None:
                self._limit = limit
                return self.excess
            if limit is None:
                self._owner_limits.pop(owner, None)
                return 0
            self._owner_limits[owner] = limit
            return max(0, self.held_by(owner) - limit)

    # -- for leases

    def _grow(self, lease: Lease, units: int, *, sole: bool) -> bool:
        self._refuse_negative(units, lease.owner)
        with self._lock:
            if lease.taken:
                return False
            self._must_be_open(lease)
            if units > self._room(lease.owner, sole=sole):
                return False
            self._enter(lease, units, from_cache=max(0, units - self._free))
            return True

    def _shrink(self, lease: Lease, units: int) -> None:
        self._refuse_negative(units, lease.owner)
        with self._lock:
            if lease.taken:
                return
            self._must_be_open(lease)
            if units > lease.units:
                raise QuotaError(f"{self.name}: {lease.owner} gives back {units} of the {lease.units} that it holds")
            self._book(lease, free=units)

    def _close(self, lease: Lease, *, cache: bool = False) -> None:
        with self._lock:
            if lease.closed:
                return
            self._must_be_open(lease)
            if cache:
                self._book(lease, cached=lease.units)
            else:
                self._book(lease, free=lease.units)
            lease.closed = True
            siblings = self._leases[lease.owner]
            siblings.discard(lease)
            if not siblings:
                del self._leases[lease.owner], self._held_by[lease.owner]

    # -- inside, with the lock held

    def _room(self, owner: str, *, sole: bool) -> int:
        room = self._free + self._cached
        if not sole:
            room = min(room, self.limit - self._held)
            if owner in self._owner_limits:
                room = min(room, self._owner_limits[owner] - self.held_by(owner))
        return max(0, room)  # never negative: asking for nothing is always granted, also above the limit

    def _open(self, owner: str, units: int, *, from_cache: int, ttl: float | None) -> Lease:
        lease = Lease(self, owner, None if ttl is None else self._clock() + ttl)
        self._leases.setdefault(owner, set()).add(lease)
        self._held_by.setdefault(owner, 0)
        self._enter(lease, units, from_cache=from_cache)
        return lease

    def _enter(self, lease: Lease, units: int, *, from_cache: int) -> None:
        self._book(lease, free=from_cache - units, cached=-from_cache)

    def _book(self, lease: Lease, *, free: int = 0, cached: int = 0) -> None:
        """The one double entry: what free and cached gain, the lease loses."""
        units = free + cached
        self._free += free
        self._cached += cached
        self._held -= units
        self._held_by[lease.owner] -= units
        lease.units -= units
        self._changed()

    def _take_back(self, leases: Iterable[Lease]) -> int:
        units = 0
        for lease in tuple(leases):
            units += lease.units
            self._close(lease)
            lease.taken = True
        return units

    def _must_be_open(self, lease: Lease) -> None:
        if lease not in self._leases.get(lease.owner, ()):  # by identity: a copy of a lease holds nothing
            raise QuotaError(f"{self.name}: {lease.owner} uses a lease that is not open (double free?)")

    def _refuse_negative(self, units: int, owner: str) -> None:
        if units < 0:
            raise QuotaError(f"{self.name}: {units} units for {owner}")

    def _compare(self, owner: str, parts: Iterable[int], booked: int) -> None:
        counted = sum(parts)
        if counted != booked:
            raise QuotaError(f"{self.name}: {owner} holds {counted} by the leases, {booked} by the books")

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.counts)


@attrs.frozen(kw_only=True)
class Verdict:
    """What becomes of a request that asked an engine's pool for more."""

    admitted: bool
    overdraft: bool  # admitted beyond the limit: ask the engine again, with nothing hidden


ADMITTED = Verdict(admitted=True, overdraft=False)
OVERDRAWN = Verdict(admitted=True, overdraft=True)
DENIED = Verdict(admitted=False, overdraft=False)


class PoolQuota:
    """The cap on what requests may hold of an engine's own pool, and what came of it.

    The engine's pool does the counting; this hides the reserve from it and remembers. On the scheduler's step path and
    in its thread only, so plain integers and no lock.
    """

    __slots__ = ("denied", "limit", "overdrafts", "peak", "peak_ever", "preempted", "total", "violations")

    def __init__(self, total: int) -> None:
        if total < 1:
            raise QuotaError(f"a quota over a pool of {total} units")
        self.total = total
        self.limit = total  # set through `set_limit`
        self.denied = 0  # times that the limit let a request wait
        self.overdrafts = 0  # times that a sole request went beyond the limit
        self.preempted = 0  # requests sent back to the queue to get below the limit
        self.peak = 0  # most that was held since the limit last changed
        self.peak_ever = 0
        self.violations = 0  # observations above the limit that no sole request explains

    def set_limit(self, limit: int | None) -> None:
        """None lifts it. At least one unit, or nothing would ever run."""
        limit = self.bounded(limit)
        if limit != self.limit:
            self.limit = limit
            self.peak = 0

    def bounded(self, limit: int | None) -> int:
        """The limit that `set_limit` would put in force."""
        return self.total if limit is None else max(1, min(limit, self.total))

    def reserve(self) -> int:
        """Units that an adapter hides from the engine's free count."""
        return self.total - self.limit

    def hidden_free(self, engine_free: int) -> int:
        """What the engine may take for its free count; cached units that nobody holds count as free."""
        free = engine_free - self.total + self.limit
        return max(0, free)

    def excess(self, held: int) -> int:
        """Units that must be won back by preempting."""
        return max(0, held - self.limit)

    def judge(self, *, granted: bool, sole: bool) -> Verdict:
        """Decide and count, after the engine tried (`granted`) with the reserve hidden.

        `sole`: no other request runs, so letting this one wait would be for ever.
        """
        if granted:
            return ADMITTED
        if self.limit == self.total:  # nothing was hidden: the pool itself is full, and the engine knows what to do
            return DENIED
        if sole:
            self.note_overdraft()
            return OVERDRAWN
        self.note_denied()
        return DENIED

    def note_denied(self) -> None:
        self.denied += 1

    def note_overdraft(self) -> None:
        self.overdrafts += 1

    def note_preempted(self, requests: int = 1) -> None:
        self.preempted += requests

    def observe(self, held: int, *, sole: bool) -> None:
        """Once per step, after the engine has scheduled it."""
        if held > self.peak:
            self.peak = held
            self.peak_ever = max(self.peak_ever, held)
        if held > self.limit and not sole:
            self.violations += 1

    def as_dict(self) -> dict[str, int]:
        """For status."""
        return {name: getattr(self, name) for name in self.__slots__}
