"""How many tokens Medusa drafts: as many as pay, found out from step times and acceptance alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import attrs
import pytest

from chunkllm_bridge.plugins.medusa.pace import JUDGED, Pace, bucket_of

WARM_UP = 200  # steps of a load before it is held against the static choices


@attrs.frozen
class World:
    """A machine and its heads, and what a step takes and yields there."""

    base: float  # seconds of a step
    row: float  # seconds per row verified
    drafting: float  # seconds of drafting at all
    shares: Sequence[float]  # of tokens right at each position, once reached
    noise: float

    @property
    def most(self) -> int:
        return len(self.shares)

    def seconds(self, requests: int, depth: int) -> float:
        return self.base + self.row * requests * (1 + depth) + self.drafting * (1 + requests / 8) * (depth > 0)

    def gain(self, depth: int) -> float:
        gain, path = 1.0, 1.0
        for share in self.shares[:depth]:
            path *= share
            gain += path
        return gain

    def rate(self, requests: int, depth: int) -> float:
        return requests * self.gain(depth) / self.seconds(requests, depth)

    @classmethod
    def any(cls, numbers: random.Random) -> World:
        shares = [numbers.uniform(0.05, 0.85)]
        while len(shares) < numbers.randint(1, 5):
            shares.append(min(0.95, shares[-1] * numbers.uniform(0.7, 1.05)))
        row, drafting = 10 ** numbers.uniform(-4.3, -1.8), numbers.choice([0, 0.001, 0.003, 0.008])
        return cls(0.04, row, drafting, shares, numbers.uniform(0.1, 0.3))


@attrs.define
class Run:
    """A pace in a world."""

    world: World
    numbers: random.Random
    pace: Pace = attrs.field(default=attrs.Factory(lambda self: Pace(range(self.world.most + 1)), takes_self=True))
    depths: list[int] = attrs.field(factory=list)

    def step(self, requests: int, most: int | None = None) -> int:
        world, numbers = self.world, self.numbers
        depth = self.pace.depth(requests, world.most if most is None else most)
        accepted = []
        for _ in range(requests):
            right = 0
            while right < depth and numbers.random() < world.shares[right]:
                right += 1
            accepted.append(right)
        spread = max(0.3, numbers.gauss(1, world.noise)) if numbers.random() > 0.02 else 3.0  # now and then a hiccup
        self.pace.settle([depth] * requests, accepted, world.seconds(requests, depth) * spread)
        self.depths.append(depth)
        return depth

    def serve(self, requests: int, steps: int) -> float:
        """Tokens per second after the warm-up, as this world has it on average."""
        tokens = seconds = 0.0
        for number in range(steps):
            depth = self.step(requests)
            if number >= WARM_UP:
                tokens += requests * self.world.gain(depth)
                seconds += self.world.seconds(requests, depth)
        return tokens / seconds

    def in_use(self, requests: int) -> int:
        return self.pace._loads[bucket_of(requests)].depth


def run_in(world: World, seed: int = 0) -> Run:
    return Run(world, random.Random(seed))


CHEAP = World(0.04, 0.00005, 0.003, (0.7, 0.7, 0.7, 0.7), 0.05)  # verification costs nothing: weights are read
DEAR = World(0.002, 0.002, 0.001, (0.35, 0.3, 0.3, 0.3), 0.05)  # every row is computed
MIXED = World(0.04, 0.0006, 0.003, (0.55, 0.45, 0.4, 0.35), 0.05)  # cheap for one request, dear for 64


@pytest.mark.parametrize("seed", range(24))
def test_never_slower_than_the_better_static_choice(seed: int) -> None:
    """Neither than always drafting all, nor than never drafting, by more than 5 %: whatever machine and heads, and
    whatever load follows on what. Cases: vllm#49548, vllm#17984, ArcticInference#185."""
    numbers = random.Random(seed)
    world = World.any(numbers)
    run = Run(world, numbers)
    for requests in [numbers.choice([1, 2, 4, 8, 16, 32, 64]) for _ in range(3)]:
        static = max(world.rate(requests, 0), world.rate(requests, world.most))

        assert 0.95 * static <= run.serve(requests, 1_200)


@pytest.mark.parametrize("seed", range(10))
def test_it_does_not_flutter(seed: int) -> None:
    """Within a load that stays, the depth in use changes a few times at most, however noisy the steps are."""
    run = run_in(World.any(random.Random(seed)), seed)
    used = []
    for _ in range(2_000):
        run.step(8)
        used.append(run.in_use(8))

    assert sum(one != other for one, other in zip(used[WARM_UP:], used[WARM_UP + 1 :], strict=False)) <= 12


@pytest.mark.parametrize("seed", range(8))
def test_never_slower_while_requests_come_and_go(seed: int) -> None:
    """The same where the load changes every few steps, from 1 request to 64 and back: each piece of work takes at most
    5 % longer than with the static choice that is the better one for all of it."""
    numbers = random.Random(seed)
    world, requests = World.any(numbers), numbers.choice([1, 4, 8, 16])
    run, seconds, static = run_in(world, seed), 0.0, {0: 0.0, world.most: 0.0}
    for number in range(2_500):
        if numbers.random() < 0.1:
            requests = max(1, min(64, requests + numbers.choice([-2, -1, 1, 2, requests, -requests // 2])))
        depth = run.step(requests)
        if number >= 500:
            seconds += world.seconds(requests, depth)
            for other in static:
                static[other] += requests * world.gain(depth) / world.rate(requests, other)

    assert seconds <= 1.05 * min(static.values())


def test_it_starts_with_all() -> None:
    """Nothing is known yet, and heads are there to be used."""
    pace = Pace(range(5))

    assert [4, 4, 2] == [pace.depth(1, 4), pace.depth(64, 4), pace.depth(1, 2)]


def test_all_where_verification_is_free() -> None:
    run = run_in(CHEAP)
    run.serve(1, 400)

    assert 4 == run.in_use(1)


def test_none_where_verification_costs_more_than_it_brings() -> None:
    run = run_in(DEAR)
    run.serve(32, 400)

    assert 0 == run.in_use(32)


def test_load_rises_and_falls() -> None:
    """Drafts end when many requests come, and are back at once when they have gone."""
    run = run_in(MIXED)
    run.serve(1, 400)
    before = run.in_use(1)
    run.serve(64, 400)
    crowded = run.in_use(64)

    assert (True, True, before) == (before >= 3, crowded <= 1, run.step(1))


def test_a_new_load_begins_as_the_one_most_like_it() -> None:
    """From 32 requests to 64 nobody starts from nothing."""
    run = run_in(DEAR)
    run.serve(32, 400)

    assert 0 == run.pace.depth(64, 4)


def test_trials_are_rare() -> None:
    """What is tried beside the depth in use costs 3 % of the time at most."""
    run = run_in(attrs.evolve(MIXED, noise=0.15))
    run.serve(4, 400)
    best = max(MIXED.rate(4, depth) for depth in range(5))

    assert 0.96 * best <= run.serve(4, 2_000)


def test_better_text_is_noticed() -> None:
    """Heads that were hardly ever right and are now: drafts come back, though nobody drafts while they are off."""
    run = run_in(attrs.evolve(MIXED, shares=(0.05, 0.05, 0.05, 0.05)))
    run.serve(16, 600)
    assert 0 == run.in_use(16)
    run.world = attrs.evolve(MIXED, shares=(0.9, 0.9, 0.9, 0.9))
    run.serve(16, 3_000)

    assert run.in_use(16) > 0


def test_whether_heads_are_any_good_is_found_out_first() -> None:
    """It does not stop drafting before there are enough drafts to judge them by: useless ones are to be told."""
    run = run_in(attrs.evolve(DEAR, shares=(0.001, 0.001, 0.001, 0.001)))
    run.step(1)
    while run.in_use(1):
        run.step(1)
        assert len(run.depths) < 3 * JUDGED

    assert JUDGED <= sum(depth > 0 for depth in run.depths)


def test_a_lower_limit_is_kept_at_once() -> None:
    """Also in the middle of a trial."""
    run = run_in(CHEAP)
    for _ in range(300):
        assert run.step(1, 2) <= 2


def test_looking_changes_nothing() -> None:
    run = run_in(MIXED)
    run.serve(3, 250)
    before = run.pace.snapshot()
    for requests in (1, 3, 99):
        run.pace.depth(requests, 4)

    assert before == run.pace.snapshot()


@pytest.mark.parametrize(
    "settle",
    [
        lambda pace: pace.settle((), (), 0.1),
        lambda pace: pace.settle([0, 0], [0, 0], 0.0),
    ],
)
def test_what_says_nothing_changes_nothing(settle: Callable[[Pace], None]) -> None:
    """Steps of unknown time; nobody at all."""
    pace = Pace(range(5))
    before = pace.snapshot()
    settle(pace)

    assert before == pace.snapshot()


def test_unknown_time_still_tells_what_was_right() -> None:
    pace = Pace(range(3))
    for _ in range(100):
        pace.settle([2, 2], [2, 0], 0.0)

    assert [1.0, 1.5, 2.0] == pytest.approx(pace.gains(), rel=0.05)
    assert {} == pace._loads


def test_a_tree_is_paid_by_the_node() -> None:
    """Depths of 2, 6 and 10 nodes: what a step takes goes by those."""
    pace = Pace([0, 2, 6, 10])
    for _ in range(200):
        depth = pace.depth(1, 3)
        nodes = [0, 2, 6, 10][depth]
        pace.settle([nodes], [min(depth, 1)], 0.01 + 0.002 * nodes)

    assert 1 == pace._loads[1].depth


def test_the_next_generation_knows_what_this_one_learned() -> None:
    """As plain data; of another shape it takes nothing."""
    run = run_in(MIXED)
    run.serve(64, 400)
    state = json.loads(json.dumps(run.pace.snapshot()))
    heir, stranger = Pace(range(5)), Pace(range(4))
    heir.migrate(state)
    stranger.migrate(state)

    assert state == json.loads(json.dumps(heir.snapshot()))
    assert run.in_use(64) == heir.depth(64, 4)
    assert {} == stranger._loads


def test_equal_inputs_give_equal_depths() -> None:
    """Ranks that see the same must draft the same."""
    one, two = run_in(MIXED, 3), run_in(MIXED, 3)
    for requests in (1, 7, 64):
        one.serve(requests, 220)
        two.serve(requests, 220)

    assert one.depths == two.depths


def test_loads_that_count_as_alike() -> None:
    ends = [n for n in range(1, 70) if bucket_of(n) != bucket_of(n + 1)]

    assert [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64] == ends
    assert sorted(map(bucket_of, range(1, 200))) == list(map(bucket_of, range(1, 200)))
