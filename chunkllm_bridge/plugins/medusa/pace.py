"""How much to draft: from measured step times and from how far the drafts were right.

Whether drafts pay depends on the load: a step that reads all weights for one request verifies four more tokens almost
for nothing, one that computes for 64 requests does not. So the time of a step is measured for each load and level, and
the level with the most tokens per second is taken: (1 + drafts expected to be right) / seconds. What was not measured
is expected from what was, at loads and levels nearby. A level that is not in use is tried now and then for a few steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import attrs

from chunkllm_bridge.plugins.medusa.levels import Level
from chunkllm_bridge.plugins.medusa.shares import Shares

MARGIN = 0.03  # a level is left for one that is better by so much, or by more where little is known
SAMPLES = 48  # step times that are remembered of a load at a level
FIRST = 10  # steps at each of three levels when a load is met for the first time and none like it is known,
ENOUGH, QUIET = 4, 0.05  # or so many, where they differ from each other by less than this share
TRIAL = 4  # steps for which a level is tried
SHARE = 0.02  # of the time that trials may cost
CHEAPEST = 0.1  # what a step of a trial counts at least, in steps of the level in use
PAUSE = 40  # steps at one level before it is left again
EVERY = 8  # steps of a load between two choices: a choice takes some 0.2 ms
TRUST = 4  # samples that weigh as much as what other loads and levels let expect
FORCED = 300  # steps after which they stop in any case: where copies abound they draft too seldom to be judged
AHEAD = 8  # steps that an engine may plan before it says how the first of them went
JUDGED = 250  # drafts of the heads before which they go on in any case: whether they are any good is not known yet


@attrs.define
class Load:
    """What is known of the steps with about so many requests."""

    requests: float  # on average
    times: list[deque[float]]  # level -> seconds of recent steps
    middles: list[float]  # level -> their median
    level: int  # in use
    plan: deque[int] = attrs.field(factory=deque)  # levels to try, one step each
    since: int = 0  # steps since the level in use was chosen

    def add(self, requests: int, level: int, seconds: float) -> None:
        self.times[level].append(seconds)
        self.middles[level] = median(self.times[level])
        self.requests += (requests - self.requests) / SAMPLES
        self.since += 1

    @property
    def is_known(self) -> bool:
        """Whether steps with and without drafts were measured."""
        return len(self.times[0]) >= ENOUGH and any(len(times) >= ENOUGH for times in self.times[1:])

    def noise(self, level: int) -> float:
        """How much step times differ: the median distance from their median, as a share of it."""
        times, middle = self.times[level], self.middles[level]
        return median(abs(time - middle) for time in times) / middle if times else 0.0


class Pace:
    """`level` looks, `settle` learns. Everything is deterministic: ranks that see the same draft the same."""

    def __init__(self, levels: Sequence[Level], *, ragged: bool) -> None:
        """`levels`, the first of which drafts nothing. `ragged`: the engine verifies as many rows as are drafted."""
        self._levels, self._ragged = tuple(levels), ragged
        self._loads: dict[int, Load] = {}  # by bucket
        self._shares = Shares()
        self._steps = 0
        self._spent = 0.0  # on trials, in steps
        self._turn = 0
        self._planned: dict[int, int] = {}  # step -> level, of the newest few

    def level(self, requests: int, most: int, step: int = 0) -> Level:
        """What to draft for so many requests, at most `most` tokens on a path."""
        at = self._planned[step] = self._pick(requests, most)
        if len(self._planned) > AHEAD:
            del self._planned[min(self._planned)]
        return self._levels[at].within(most)

    def _pick(self, requests: int, most: int) -> int:
        load = self._loads.get(bucket := bucket_of(requests))
        fitting = max(at for at, level in enumerate(self._levels) if level.drafted <= most)
        if load is None:
            return min(fitting, self._first_level(bucket, requests))
        if load.plan and load.plan[0] <= fitting:
            return load.plan[0]
        if load.level <= fitting:
            return load.level
        rates = self._rates(bucket, load.requests)[: fitting + 1]
        return max(self._least, rates.index(max(rates)))

    def settle(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
        copied: Sequence[bool] | None = None,
        step: int = 0,
    ) -> None:
        """How a step went, a number per request, and whether its draft was a copy; 0 seconds say nothing about time."""
        if not drafted:
            return
        mean, mixed = sum(drafted) / len(drafted), copied is not None and any(copied)
        at = planned = self._planned.get(step, 0)
        if not mixed:  # what was drafted shows which level that was, also where less than planned was
            at = min(range(len(self._levels)), key=lambda at: (abs(self._levels[at].nodes - mean), at != planned))
        self._shares.seen(copied or (), self._levels[at].copied)
        for place, (tokens, right) in enumerate(zip(drafted, accepted, strict=True)):
            if tokens:
                is_copy = bool(copied and copied[place])
                self._shares.learn(tokens if is_copy else min(self._levels[at].drafted or 1, tokens), right, is_copy)
        if seconds <= 0 or (not mixed and 2 * min(drafted) < mean):
            return
        bucket = bucket_of(len(drafted))
        load = self._loads.get(bucket) or self._meet(bucket, len(drafted))
        load.add(len(drafted), at, seconds)
        self._steps += 1
        was_planned = bool(load.plan)
        if load.plan:
            load.plan.popleft()
            if len(load.times[at]) >= ENOUGH and load.noise(at) < QUIET:
                while load.plan and load.plan[0] == at:
                    load.plan.popleft()
        if not load.plan and (was_planned or load.since % EVERY == 0):
            self._choose(bucket, load)

    def gains(self) -> list[float]:
        """Level -> tokens that a step is expected to yield per request."""
        return [self._shares.gain(level) for level in self._levels]

    @property
    def _most(self) -> int:
        return len(self._levels) - 1

    @property
    def _least(self) -> int:
        """The first level that may be used: whether the heads are any good must become known."""
        if self._shares.drafts >= JUDGED or self._steps >= FORCED:
            return 0
        return next((at for at, level in enumerate(self._levels) if level.drafted), 0)

    # ---- how long a step takes ----

    def _seconds(self, bucket: int, requests: float) -> list[float]:
        """Level -> seconds: the load's own median, leant on what others let expect."""
        load = self._loads.get(bucket)
        base, per_row, drafting = self._line(bucket)
        found = []
        for at, level in enumerate(self._levels):
            rows = requests * self._rows(level, requests)
            expected = base + per_row * rows + (drafting if level.drafted else 0.0)
            count = 0 if load is None else len(load.times[at])
            own = 0.0 if load is None else load.middles[at]
            found.append((own * count + expected * TRUST) / (count + TRUST))
        return found

    def _rows(self, level: Level, requests: float) -> float:
        return level.rows(requests, self._shares.hits, ragged=self._ragged)

    def _rates(self, bucket: int, requests: float) -> list[float]:
        """Level -> tokens per second and request."""
        seconds = self._seconds(bucket, requests)
        return [gain / each if each > 0 else 0.0 for gain, each in zip(self.gains(), seconds, strict=True)]

    def _points(self, bucket: int) -> Iterator[tuple[float, float, bool, float]]:
        """(rows, seconds, with heads, weight): every load and level that was measured; those nearby weigh more."""
        for other, load in self._loads.items():
            near = 0.5 ** abs(other - bucket)
            for level, times, middle in zip(self._levels, load.times, load.middles, strict=True):
                if times:
                    rows = load.requests * self._rows(level, load.requests)
                    yield rows, middle, level.drafted > 0, near * len(times)

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

    # ---- which level ----

    def _meet(self, bucket: int, requests: int) -> Load:
        """A load for the first time: what to expect of it is known from others like it, or is measured."""
        first = self._first_level(bucket, requests)
        known = any(load.is_known and abs(other - bucket) <= 2 for other, load in self._loads.items())
        load = Load(float(requests), [deque(maxlen=SAMPLES) for _ in self._levels], [0.0 for _ in self._levels], first)
        if not known:
            load.plan.extend([self._most] * FIRST + [0] * FIRST + [(self._most + 1) // 2] * FIRST)
        self._loads[bucket] = load
        return load

    def _first_level(self, bucket: int, requests: int) -> int:
        if not self._loads:
            return self._most
        rates = self._rates(bucket, requests)
        return max(range(self._least, len(rates)), key=rates.__getitem__)

    def _choose(self, bucket: int, load: Load) -> None:
        rates, now, least = self._rates(bucket, load.requests), load.level, self._least
        best = max(range(least, len(rates)), key=rates.__getitem__)
        if now < least:
            best = now = load.level = least
        if best != now and load.since >= PAUSE:
            need = 1 + max(MARGIN, 1.5 * load.noise(now) / max(1, len(load.times[best])) ** 0.5)
            if rates[best] > rates[now] * need:
                load.level, load.since = best, 0
                return
            if rates[best] > rates[now] * (1 + MARGIN) and self._try(bucket, load, best):
                return
        if load.since >= PAUSE:
            others = [best, now + 1, now - 1, 0, self._most]
            pick = others[self._turn % len(others)]
            if not least <= pick <= self._most or pick == now or self._try(bucket, load, pick):
                self._turn += 1

    def _try(self, bucket: int, load: Load, level: int) -> bool:
        """Plan a trial of a level, if what it will probably cost can be spent by now."""
        seconds, gains, now = self._seconds(bucket, load.requests), self.gains(), load.level
        price = TRIAL * max(CHEAPEST, seconds[level] / seconds[now] - gains[level] / gains[now])
        if self._spent + price > SHARE * self._steps:
            return False
        self._spent += price
        load.plan.extend([level] * TRIAL)
        return True

    # ---- from one generation to the next ----

    def snapshot(self) -> dict[str, Any]:
        return {
            "levels": [list(attrs.astuple(level)) for level in self._levels],
            "shares": self._shares.snapshot(),
            "steps": self._steps,
            "spent": self._spent,
            "loads": {
                str(bucket): [load.requests, load.level, [list(times) for times in load.times]]
                for bucket, load in self._loads.items()
            },
        }

    def migrate(self, state: Mapping[str, Any]) -> None:
        """Times and shares of another generation; none of one that drafts otherwise."""
        if state.get("levels") != [list(attrs.astuple(level)) for level in self._levels]:
            return
        self._shares.migrate(state["shares"])
        self._steps, self._spent = state["steps"], state["spent"]
        for bucket, (requests, level, times) in state["loads"].items():
            kept = [deque(each, maxlen=SAMPLES) for each in times]
            middles = [median(each) if each else 0.0 for each in kept]
            self._loads[int(bucket)] = Load(requests, kept, middles, level)


def bucket_of(requests: int) -> int:
    """Loads that count as alike: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ..."""
    if requests <= 2:
        return requests
    power = (requests - 1).bit_length() - 1  # 2^power < requests <= 2^(power + 1)
    return 2 * power + 1 + int(requests > 3 << power >> 1)
