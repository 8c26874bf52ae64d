"""How drafts fared: in all, at each position, over the last minute, and per request."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

SLICES = 6
SLICE_SECONDS = 10.0
BOUNDS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
"""Upper bounds of the buckets in which finished requests are counted by their acceptance length."""
MOST_SOURCES = 8
"""Sources that are counted apart; their names become label values."""
MOST_REQUESTS = 10_000
"""Requests that are remembered; an adapter that forgets to say who finished loses the oldest, not memory."""


def length(drafts: int, accepted: int) -> float:
    """Tokens that a step with drafts yields, the model's own included; 0.0 without drafts."""
    return 1 + accepted / drafts if drafts else 0.0


@attrs.define
class Count:
    """Verified drafts. A draft is one request's in one step."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted += accepted


class Acceptance:
    """Takes each verified draft; plain decodes are none and leave no mark."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total = Count()
        self.sources: dict[str, Count] = {}
        self.at: list[int] = []  # position -> drafts accepted up to there or further
        self.buckets = [[0, 0.0] for _ in range(len(BOUNDS) + 1)]  # finished requests, sum of their lengths
        self._slices: list[tuple[float, Count]] = []
        self._requests: dict[str, Count] = {}

    def note(
        self, request_ids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int], sources: Sequence[str]
    ) -> None:
        """One verified step, a number and a source per request."""
        if not any(drafted):
            return
        now = self._clock()
        if not self._slices or now - self._slices[-1][0] >= SLICE_SECONDS:
            self._slices = [*self._fresh(now), (now, Count())]
        recent = self._slices[-1][1]
        for request_id, tokens, right, source in zip(request_ids, drafted, accepted, sources, strict=True):
            if not tokens:
                continue
            own = self._requests.get(request_id)
            if own is None:
                own = self._requests[request_id] = Count()
                if len(self._requests) > MOST_REQUESTS:
                    del self._requests[next(iter(self._requests))]
            for count in (self.total, recent, own, self._of_source(source)):
                count.add(tokens, right)
            self.at += [0] * (right - len(self.at))
            for position in range(right):
                self.at[position] += 1

    def _of_source(self, source: str) -> Count:
        if source not in self.sources and len(self.sources) >= MOST_SOURCES:
            source = "other"
        return self.sources.setdefault(source, Count())

    def finished(self, request_id: str) -> None:
        """A request is over; one that never had a draft is not counted."""
        count = self._requests.pop(request_id, None)
        if count is not None:
            found = length(count.drafts, count.accepted)
            bucket = self.buckets[bisect.bisect_left(BOUNDS, found)]
            bucket[0] += 1
            bucket[1] += found

    @property
    def recent(self) -> float:
        """The acceptance length over the last minute; 0.0 where nothing was drafted in it."""
        counts = [count for _, count in self._fresh(self._clock())]
        return length(sum(count.drafts for count in counts), sum(count.accepted for count in counts))

    def of(self, request_id: str) -> float:
        """The acceptance length of a request that lives; 0.0 without drafts."""
        count = self._requests.get(request_id, Count())
        return length(count.drafts, count.accepted)

    def report(self) -> dict[str, Any]:
        """Plain data; what is counted only grows."""
        return {
            **attrs.asdict(self.total),
            "sources": {name: attrs.asdict(count) for name, count in self.sources.items()},
            "accepted_at": list(self.at),
            "acceptance_length": self.recent,
            "acceptance_length_total": length(self.total.drafts, self.total.accepted),
            "finished": [list(bucket) for bucket in self.buckets],
        }

    def _fresh(self, now: float) -> list[tuple[float, Count]]:
        return [(start, count) for start, count in self._slices if now - start < SLICES * SLICE_SECONDS]
