"""How many tokens to draft: from measured step times and from how far the drafts were right.

Whether drafts pay depends on the load: a step that reads all weights for one request verifies four more tokens almost
for nothing, one that computes for 64 requests does not. So the time of a step is measured for each load and depth, and
the depth with the most tokens per second is taken: (1 + drafts expected to be right) / seconds. What was not measured
is expected from what was, at loads and depths nearby. A depth that is not in use is tried now and then for a few steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import attrs

MARGIN = 0.03  # a depth is left for one that is better by so much, or by more where little is known
SAMPLES = 48  # step times that are remembered of a load at a depth
FIRST = 10  # steps at each of three depths when a load is met for the first time and none like it is known,
ENOUGH, QUIET = 4, 0.05  # or so many, where they differ from each other by less than this share
TRIAL = 4  # steps for which a depth is tried
SHARE = 0.02  # of the time that trials may cost
CHEAPEST = 0.1  # what a step of a trial counts at least, in steps of the depth in use
PAUSE = 40  # steps at one depth before it is left again
EVERY = 8  # steps of a load between two choices: a choice takes some 0.2 ms
TRUST = 4  # samples that weigh as much as what other loads and depths let expect
MEMORY = 400  # drafts over which a position's share of right ones is taken
PRIOR, PRIOR_WEIGHT = 0.6, 6.0  # of a position that was never tried
JUDGED = 250  # drafts before which drafting does not stop altogether: whether they are any good is not known yet


@attrs.define
class Load:
    """What is known of the steps with about so many requests."""

    requests: float  # on average
    times: list[deque[float]]  # depth -> seconds of recent steps
    middles: list[float]  # depth -> their median
    depth: int  # in use
    plan: deque[int] = attrs.field(factory=deque)  # depths to try, one step each
    since: int = 0  # steps since the depth in use was chosen

    def add(self, requests: int, depth: int, seconds: float) -> None:
        self.times[depth].append(seconds)
        self.middles[depth] = median(self.times[depth])
        self.requests += (requests - self.requests) / SAMPLES
        self.since += 1

    @property
    def is_known(self) -> bool:
        """Whether steps with and without drafts were measured."""
        return len(self.times[0]) >= ENOUGH and any(len(times) >= ENOUGH for times in self.times[1:])

    def noise(self, depth: int) -> float:
        """How much step times differ: the median distance from their median, as a share of it."""
        times, middle = self.times[depth], self.middles[depth]
        return median(abs(time - middle) for time in times) / middle if times else 0.0


class Pace:
    """`depth` looks, `settle` learns. Everything is deterministic: ranks that see the same draft the same."""

    def __init__(self, costs: Sequence[int]) -> None:
        """`costs`: draft tokens per request at each depth, from 0 on; a chain's are 0, 1, 2, ..."""
        self._costs = tuple(costs)
        self._loads: dict[int, Load] = {}  # by bucket
        self._right = [[0.0, 0.0] for _ in self._costs[1:]]  # position -> drafts that got there, those right there
        self._drafts = 0
        self._steps = 0
        self._spent = 0.0  # on trials, in steps
        self._turn = 0

    @property
    def most(self) -> int:
        return len(self._costs) - 1

    def depth(self, requests: int, most: int) -> int:
        """Tokens to draft on a path, at most `most`, for so many requests. 0: none."""
        load = self._loads.get(bucket := bucket_of(requests))
        if load is None:
            depth = self._first_depth(bucket, requests)
            return min(most, depth)
        if load.plan and load.plan[0] <= most:
            return load.plan[0]
        if load.depth <= most:
            return load.depth
        rates = self._rates(bucket, load.requests)[: most + 1]
        return max(self._least, rates.index(max(rates)))

    def settle(self, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """How a step went, a number per request; 0 seconds say nothing about time."""
        if not drafted:
            return
        mean = sum(drafted) / len(drafted)
        depth = min(range(len(self._costs)), key=lambda at: abs(self._costs[at] - mean))
        for tokens, right in zip(drafted, accepted, strict=True):
            if tokens:
                self._learn(min(depth or 1, tokens), right)
        if seconds <= 0 or 2 * min(drafted) < mean:
            return
        bucket = bucket_of(len(drafted))
        load = self._loads.get(bucket) or self._meet(bucket, len(drafted))
        load.add(len(drafted), depth, seconds)
        self._steps += 1
        was_planned = bool(load.plan)
        if load.plan:
            load.plan.popleft()
            if len(load.times[depth]) >= ENOUGH and load.noise(depth) < QUIET:
                while load.plan and load.plan[0] == depth:
                    load.plan.popleft()
        if not load.plan and (was_planned or load.since % EVERY == 0):
            self._choose(bucket, load)

    # ---- how often drafts are right ----

    def _learn(self, reached: int, right: int) -> None:
        self._drafts += 1
        for position in range(min(reached, right + 1)):
            counts = self._right[position]
            counts[0] += 1 - counts[0] / MEMORY
            counts[1] += (right > position) - counts[1] / MEMORY

    def gains(self) -> list[float]:
        """Depth -> tokens that a step is expected to yield."""
        gains, path = [1.0], 1.0
        for tried, right in self._right:
            path *= (right + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
            gains.append(gains[-1] + path)
        return gains

    @property
    def _least(self) -> int:
        return 0 if self._drafts >= JUDGED else min(1, self.most)

    # ---- how long a step takes ----

    def _seconds(self, bucket: int, requests: float) -> list[float]:
        """Depth -> seconds: the load's own median, leant on what others let expect."""
        load = self._loads.get(bucket)
        base, per_row, drafting = self._line(bucket)
        found = []
        for depth, cost in enumerate(self._costs):
            expected = base + per_row * requests * (1 + cost) + (drafting if depth else 0.0)
            count = 0 if load is None else len(load.times[depth])
            own = 0.0 if load is None else load.middles[depth]
            found.append((own * count + expected * TRUST) / (count + TRUST))
        return found

    def _rates(self, bucket: int, requests: float) -> list[float]:
        """Depth -> tokens per second and request."""
        seconds = self._seconds(bucket, requests)
        return [gain / each if each > 0 else 0.0 for gain, each in zip(self.gains(), seconds, strict=True)]

    def _points(self, bucket: int) -> Iterator[tuple[float, float, bool, float]]:
        """(rows, seconds, with drafts, weight): every load and depth that was measured; those nearby weigh more."""
        for other, load in self._loads.items():
            near = 0.5 ** abs(other - bucket)
            for depth, times in enumerate(load.times):
                if times:
                    rows = load.requests * (1 + self._costs[depth])
                    yield rows, load.middles[depth], depth > 0, near * len(times)

    def _line(self, bucket: int) -> tuple[float, float, float]:
        """(seconds of a step, per row, of drafting at all) as the loads around this one have it; none is negative.

        One slope for steps with and without drafts, and a mean of its own for each kind.
        """
        kinds: list[list[tuple[float, float, float]]] = [[], []]
        for rows, seconds, drafts, weight in self._points(bucket):
            kinds[drafts].append((rows, seconds, weight))
        spread = lean = 0.0
        means = []
        for points in kinds:
            total = sum(weight for *_, weight in points)
            x = sum(rows * weight for rows, _, weight in points) / total if total else 0.0
            y = sum(seconds * weight for _, seconds, weight in points) / total if total else 0.0
            spread += sum(weight * (rows - x) ** 2 for rows, _, weight in points)
            lean += sum(weight * (rows - x) * (seconds - y) for rows, seconds, weight in points)
            means.append((x, y, total))
        slope = max(0.0, lean / spread) if spread else 0.0
        for x, y, total in means:
            if total:
                slope = min(slope, y / x)
        plain, drafting = (y - slope * x if total else None for x, y, total in means)
        if plain is None or drafting is None:
            known = plain if plain is not None else drafting if drafting is not None else 1.0
            return known, slope, 0.0
        return plain, slope, max(0.0, drafting - plain)

    # ---- which depth ----

    def _meet(self, bucket: int, requests: int) -> Load:
        """A load for the first time: what to expect of it is known from others like it, or is measured."""
        depth = self._first_depth(bucket, requests)
        known = any(load.is_known and abs(other - bucket) <= 2 for other, load in self._loads.items())
        load = Load(float(requests), [deque(maxlen=SAMPLES) for _ in self._costs], [0.0 for _ in self._costs], depth)
        if not known:
            load.plan.extend([self.most] * FIRST + [0] * FIRST + [(self.most + 1) // 2] * FIRST)
        self._loads[bucket] = load
        return load

    def _first_depth(self, bucket: int, requests: int) -> int:
        if not self._loads:
            return self.most
        rates = self._rates(bucket, requests)
        return max(range(self._least, len(rates)), key=rates.__getitem__)

    def _choose(self, bucket: int, load: Load) -> None:
        rates, now, least = self._rates(bucket, load.requests), load.depth, self._least
        best = max(range(least, len(rates)), key=rates.__getitem__)
        if now < least:
            best = now = load.depth = least
        if best != now and load.since >= PAUSE:
            need = 1 + max(MARGIN, 1.5 * load.noise(now) / max(1, len(load.times[best])) ** 0.5)
            if rates[best] > rates[now] * need:
                load.depth, load.since = best, 0
                return
            if rates[best] > rates[now] * (1 + MARGIN) and self._try(bucket, load, best):
                return
        if load.since >= PAUSE:
            others = [best, now + 1, now - 1, 0, self.most]
            pick = others[self._turn % len(others)]
            if not least <= pick <= self.most or pick == now or self._try(bucket, load, pick):
                self._turn += 1

    def _try(self, bucket: int, load: Load, depth: int) -> bool:
        """Plan a trial of a depth, if what it will probably cost can be spent by now."""
        seconds, gains, now = self._seconds(bucket, load.requests), self.gains(), load.depth
        price = TRIAL * max(CHEAPEST, seconds[depth] / seconds[now] - gains[depth] / gains[now])
        if self._spent + price > SHARE * self._steps:
            return False
        self._spent += price
        load.plan.extend([depth] * TRIAL)
        return True

    # ---- from one generation to the next ----

    def snapshot(self) -> dict[str, Any]:
        return {
            "costs": list(self._costs),
            "drafts": self._drafts,
            "steps": self._steps,
            "spent": self._spent,
            "right": [list(counts) for counts in self._right],
            "loads": {
                str(bucket): [load.requests, load.depth, [list(times) for times in load.times]]
                for bucket, load in self._loads.items()
            },
        }

    def migrate(self, state: Mapping[str, Any]) -> None:
        """Times and shares of another generation; none of one that drafts otherwise."""
        if state.get("costs") != list(self._costs):
            return
        self._drafts, self._steps, self._spent = state["drafts"], state["steps"], state["spent"]
        self._right = [list(counts) for counts in state["right"]]
        for bucket, (requests, depth, times) in state["loads"].items():
            kept = [deque(each, maxlen=SAMPLES) for each in times]
            middles = [median(each) if each else 0.0 for each in kept]
            self._loads[int(bucket)] = Load(requests, kept, middles, depth)


def bucket_of(requests: int) -> int:
    """Loads that count as alike: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ..."""
    if requests <= 2:
        return requests
    power = (requests - 1).bit_length() - 1  # 2^power < requests <= 2^(power + 1)
    return 2 * power + 1 + int(requests > 3 << power >> 1)
