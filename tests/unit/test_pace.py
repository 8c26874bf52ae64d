"""How many tokens Medusa drafts: as many as pay, found out from step times and acceptance alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence

import attrs
import pytest

from chunkllm_bridge.plugins.medusa.levels import Level, chains, trees
from chunkllm_bridge.plugins.medusa.pace import FORCED, JUDGED, Pace, bucket_of

WARM_UP = 200  # steps of a load before it is held against the static choices


@attrs.frozen
class World:
    """A machine, its heads and its texts, and what a step takes and yields there."""

    base: float  # seconds of a step
    row: float  # seconds per row verified
    drafting: float  # seconds of drafting with heads at all
    shares: Sequence[float]  # of the heads' tokens right at each position, once reached
    noise: float
    hits: float = 0.0  # share of requests that there is a copy for
    copies: Sequence[float] = ()  # as `shares`, of copied tokens; empty: nobody copies
    ragged: bool = False  # as many rows as are drafted for each; else as many as for the one with the most

    @property
    def most(self) -> int:
        return len(self.shares)

    @property
    def levels(self) -> list[Level]:
        return chains(self.most, copies=bool(self.copies), ragged=self.ragged)

    def seconds(self, requests: int, level: Level) -> float:
        """On average."""
        hits = self.hits if level.copied else 0.0
        rows = hits * level.copied + (1 - hits) * level.drafted if self.ragged else max(level.copied, level.drafted)
        heads = 1 - hits**requests + (1 - hits) * requests / 8 if level.drafted else 0.0
        return self.base + self.row * requests * (1 + rows) + self.drafting * heads

    def gain(self, level: Level) -> float:
        hits = self.hits if level.copied else 0.0
        return 1 + hits * path(self.copies, level.copied) + (1 - hits) * path(self.shares, level.drafted)

    def rate(self, requests: int, level: Level) -> float:
        return requests * self.gain(level) / self.seconds(requests, level)

    @classmethod
    def any(cls, numbers: random.Random) -> World:
        shares = [numbers.uniform(0.05, 0.85)]
        while len(shares) < numbers.randint(1, 5):
            shares.append(min(0.95, shares[-1] * numbers.uniform(0.7, 1.05)))
        row, drafting = 10 ** numbers.uniform(-4.3, -1.8), numbers.choice([0, 0.001, 0.003, 0.008])
        return cls(0.04, row, drafting, shares, numbers.uniform(0.1, 0.3))

    def copying(self, numbers: random.Random, *, ragged: bool) -> World:
        """The same with texts that tell what comes, now often and now hardly ever."""
        copies = [numbers.uniform(0.35, 0.95)]
        while len(copies) < self.most:
            copies.append(min(0.98, copies[-1] * numbers.uniform(0.8, 1.1)))
        return attrs.evolve(self, hits=numbers.uniform(0.02, 0.9), copies=copies, ragged=ragged)


def path(shares: Sequence[float], reached: int) -> float:
    """Tokens right of so many."""
    return sum(math.prod(shares[: place + 1]) for place in range(reached))


@attrs.define
class Run:
    """A pace in a world."""

    world: World
    numbers: random.Random
    pace: Pace = attrs.field(
        default=attrs.Factory(lambda self: Pace(self.world.levels, ragged=self.world.ragged), takes_self=True)
    )
    levels: list[Level] = attrs.field(factory=list)
    heads: int = 0  # drafts of theirs

    def step(self, requests: int, most: int | None = None) -> Level:
        world, numbers = self.world, self.numbers
        level = self.pace.level(requests, world.most if most is None else most)
        copied = [level.copied > 0 and numbers.random() < world.hits for _ in range(requests)]
        drafted = [level.copied if copy else level.drafted for copy in copied]
        accepted = []
        for copy, tokens in zip(copied, drafted, strict=True):
            right, shares = 0, world.copies if copy else world.shares
            while right < tokens and numbers.random() < shares[right]:
                right += 1
            accepted.append(right)
        rows = sum(drafted) if world.ragged else requests * max(drafted)
        others = copied.count(False) if level.drafted else 0
        seconds = world.base + world.row * (requests + rows) + world.drafting * (others > 0) * (1 + others / 8)
        spread = max(0.3, numbers.gauss(1, world.noise)) if numbers.random() > 0.02 else 3.0  # now and then a hiccup
        self.pace.settle(drafted, accepted, seconds * spread, copied if world.copies else None)
        self.levels.append(level)
        self.heads += others
        return level

    def serve(self, requests: int, steps: int) -> float:
        """Tokens per second after the warm-up, as this world has it on average."""
        tokens = seconds = 0.0
        for number in range(steps):
            level = self.step(requests)
            if number >= WARM_UP:
                tokens += requests * self.world.gain(level)
                seconds += self.world.seconds(requests, level)
        return tokens / seconds

    def in_use(self, requests: int) -> int:
        return self.pace._loads[bucket_of(requests)].level


def pace_of(most: int, **more: bool) -> Pace:
    """Of chains; nobody copies, and every request is verified with the widest."""
    facts = {"copies": False, "ragged": False, **more}
    return Pace(chains(most, **facts), ragged=facts["ragged"])


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
        static = max(world.rate(requests, level) for level in (world.levels[0], world.levels[-1]))

        assert 0.95 * static <= run.serve(requests, 1_200)


@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "padded"])
@pytest.mark.parametrize("seed", range(16))
def test_never_slower_with_copies_among_the_drafts(seed: int, ragged: bool) -> None:
    """The same where some requests have copies, which are right more often or less, and cost no heads."""
    numbers = random.Random(1_000 + seed)
    world = World.any(numbers).copying(numbers, ragged=ragged)
    run = Run(world, numbers)
    for requests in [numbers.choice([1, 2, 4, 8, 16, 32, 64]) for _ in range(3)]:
        static = max(world.rate(requests, level) for level in (world.levels[0], world.levels[-1]))

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


@pytest.mark.parametrize("copies", ["none", "ragged", "padded"])
@pytest.mark.parametrize("seed", range(8))
def test_never_slower_while_requests_come_and_go(seed: int, copies: str) -> None:
    """The same where the load changes every few steps, from 1 request to 64 and back: each piece of work takes at most
    5 % longer than with the static choice that is the better one for all of it."""
    numbers = random.Random(seed)
    world, requests = World.any(numbers), numbers.choice([1, 4, 8, 16])
    if copies != "none":
        world = world.copying(numbers, ragged=copies == "ragged")
    run, seconds, static = run_in(world, seed), 0.0, {world.levels[0]: 0.0, world.levels[-1]: 0.0}
    for number in range(2_500):
        if numbers.random() < 0.1:
            requests = max(1, min(64, requests + numbers.choice([-2, -1, 1, 2, requests, -requests // 2])))
        level = run.step(requests)
        if number >= 500:
            seconds += world.seconds(requests, level)
            for other in static:
                static[other] += requests * world.gain(level) / world.rate(requests, other)

    assert seconds <= 1.05 * min(static.values())


def test_it_starts_with_all() -> None:
    """Nothing is known yet, and heads are there to be used."""
    pace = pace_of(4)

    assert [4, 4, 2] == [pace.level(1, 4).drafted, pace.level(64, 4).drafted, pace.level(1, 2).drafted]


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

    assert (True, True, before) == (before >= 3, crowded <= 1, run.step(1).drafted)


def test_a_new_load_begins_as_the_one_most_like_it() -> None:
    """From 32 requests to 64 nobody starts from nothing."""
    run = run_in(DEAR)
    run.serve(32, 400)

    assert Level() == run.pace.level(64, 4)


def test_trials_are_rare() -> None:
    """What is tried beside the depth in use costs 3 % of the time at most."""
    run = run_in(attrs.evolve(MIXED, noise=0.15))
    run.serve(4, 400)
    best = max(MIXED.rate(4, level) for level in MIXED.levels)

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
        assert len(run.levels) < 3 * JUDGED

    assert JUDGED <= sum(level.drafted > 0 for level in run.levels)


USELESS = (0.001, 0.001, 0.001, 0.001)
GOOD_TEXTS = attrs.evolve(MIXED, hits=0.4, copies=(0.9, 0.9, 0.9, 0.9), ragged=True)


def test_copies_alone_where_heads_do_not_pay() -> None:
    """A copy costs no pass over the heads: an engine that verifies what is drafted ends up with copies and no more."""
    run = run_in(attrs.evolve(GOOD_TEXTS, drafting=0.03, shares=(0.3, 0.3, 0.3, 0.3)))
    run.serve(8, 1_200)

    assert Level(4, 0, 0) == run.world.levels[run.in_use(8)]


def test_heads_beside_copies_where_both_pay() -> None:
    run = run_in(attrs.evolve(GOOD_TEXTS, row=0.00005, shares=(0.7, 0.7, 0.7, 0.7)))
    run.serve(8, 1_200)

    assert 3 <= run.world.levels[run.in_use(8)].drafted


@pytest.mark.parametrize("ragged", [True, False])
def test_no_copies_where_they_do_not_pay_either(ragged: bool) -> None:
    world = attrs.evolve(DEAR, hits=0.5, copies=(0.36, 0.3, 0.3, 0.3), ragged=ragged)
    run = run_in(world)
    run.serve(32, 400)

    assert Level() == run.world.levels[run.in_use(32)]


def test_useless_heads_are_found_out_beside_right_copies() -> None:
    """They draft until there are enough of their own drafts to judge them by, however well copies do; then copies
    alone."""
    run = run_in(attrs.evolve(GOOD_TEXTS, drafting=0.03, shares=USELESS))
    run.step(4)
    while run.world.levels[run.in_use(4)].drafted:
        run.step(4)
        assert len(run.levels) < 2 * JUDGED
    assert JUDGED <= run.heads
    run.serve(4, 400)

    assert Level(4, 0, 0) == run.world.levels[run.in_use(4)]


def test_texts_begin_to_repeat() -> None:
    """Where neither heads nor copies paid, copies are back when they do: a trial now and then shows it."""
    run = run_in(attrs.evolve(MIXED, shares=(0.05,) * 4, hits=0.5, copies=(0.1,) * 4, ragged=True))
    run.serve(16, 800)
    assert Level() == run.world.levels[run.in_use(16)]
    run.world = attrs.evolve(run.world, copies=(0.95,) * 4)
    run.serve(16, 3_000)

    assert 4 == run.world.levels[run.in_use(16)].copied


@pytest.mark.parametrize("ragged", [True, False])
def test_a_copy_is_no_longer_than_allowed(ragged: bool) -> None:
    run = run_in(attrs.evolve(GOOD_TEXTS, ragged=ragged))
    for _ in range(300):
        level = run.step(4, 2)
        assert max(level.copied, level.drafted) <= 2


@pytest.mark.parametrize("copies", [False, True])
def test_steps_that_are_heard_of_late(copies: bool) -> None:
    """An engine that schedules ahead plans a step before it tells of the one before: each time still counts for the
    level that it took. There are no copies then: nobody has read the texts."""
    pace, open_ = pace_of(4, copies=copies), [0]
    for _ in range(600):
        planned = pace.level(4, 4).drafted
        late = open_.pop()
        pace.settle([late] * 4, [late // 2] * 4, 0.01 + 0.002 * late, [False] * 4 if copies else None)
        open_.append(planned)

    times = [set(found) for found in pace._loads[bucket_of(4)].times]
    assert all(found <= {0.01 + 0.002 * depth} for depth, found in enumerate(times))
    assert 3 <= sum(map(bool, times))


@pytest.mark.parametrize("copies", [False, True])
def test_a_step_of_which_some_were_cut_says_nothing_of_time(copies: bool) -> None:
    """Drafts that the engine dropped for some requests."""
    pace = pace_of(4, copies=copies, ragged=copies)
    pace.level(3, 4)
    pace.settle([4, 0, 4], [1, 0, 1], 0.5, [False] * 3 if copies else None)

    assert {} == pace._loads


def test_shares_are_of_copies_and_heads_apart() -> None:
    """Copies that are always right make no head look good, nor the other way round; and of how many there are is
    known."""
    pace = pace_of(2, copies=True, ragged=True)
    for _ in range(1_500):
        pace.level(4, 2)
        pace.settle([2] * 4, [2, 0, 0, 0], 0.0, [True, False, False, False])

    nothing, copied, *_, both = pace.gains()
    assert (1.0, 1.5, 1.5) == pytest.approx((nothing, copied, both), abs=0.05)
    assert 0.25 == pytest.approx(pace._shares.hits, abs=0.05)


def test_heads_that_hardly_ever_draft_are_not_forced_for_ever() -> None:
    """Where copies abound, the drafts to judge heads by may never come together: the trial ends after so many steps."""
    pace = Pace(chains(4, copies=True, ragged=True), ragged=True)
    forced = []
    for step in range(FORCED + 1):
        forced.append(pace._least > 0)
        pace.level(1, 4, step)
        pace.settle([4], [4], 0.05, [True], step)

    assert [True] * FORCED + [False] == forced


def test_a_lower_limit_is_kept_at_once() -> None:
    """Also in the middle of a trial."""
    run = run_in(CHEAP)
    for _ in range(300):
        assert run.step(1, 2).drafted <= 2


def test_looking_changes_nothing() -> None:
    run = run_in(MIXED)
    run.serve(3, 250)
    before = run.pace.snapshot()
    for requests in (1, 3, 99):
        run.pace.level(requests, 4)

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
    pace = pace_of(4)
    before = pace.snapshot()
    settle(pace)

    assert before == pace.snapshot()


def test_unknown_time_still_tells_what_was_right() -> None:
    pace = pace_of(2)
    for _ in range(100):
        pace.settle([2, 2], [2, 0], 0.0)

    assert [1.0, 1.5, 2.0] == pytest.approx(pace.gains(), rel=0.05)
    assert {} == pace._loads


def test_a_tree_is_paid_by_the_node() -> None:
    """Depths of 2, 6 and 10 nodes: what a step takes goes by those."""
    pace = Pace(trees([2, 6, 10]), ragged=False)
    for _ in range(200):
        level = pace.level(1, 3)
        pace.settle([level.nodes], [min(level.drafted, 1)], 0.01 + 0.002 * level.nodes)

    assert 1 == pace._loads[1].level


@pytest.mark.parametrize("world", [MIXED, GOOD_TEXTS])
def test_the_next_generation_knows_what_this_one_learned(world: World) -> None:
    """As plain data; of another shape it takes nothing."""
    run = run_in(world)
    run.serve(64, 400)
    state = json.loads(json.dumps(run.pace.snapshot()))
    heir, strangers = run_in(world).pace, (pace_of(3), pace_of(4, copies=True))
    for pace in (heir, *strangers):
        pace.migrate(state)

    assert state == json.loads(json.dumps(heir.snapshot()))
    assert run.pace.level(64, 4) == heir.level(64, 4)
    assert [{}, {}] == [stranger._loads for stranger in strangers]


def test_equal_inputs_give_equal_levels() -> None:
    """Ranks that see the same must draft the same."""
    one, two = run_in(GOOD_TEXTS, 3), run_in(GOOD_TEXTS, 3)
    for requests in (1, 7, 64):
        one.serve(requests, 220)
        two.serve(requests, 220)

    assert one.levels == two.levels


@pytest.mark.parametrize(
    ("level", "requests", "hits", "rows"),
    [
        (Level(), 8, 0.5, (1, 1)),
        (Level(4, 2, 2), 8, 0.5, (4, 5)),
        (Level(4, 2, 2), 8, 0.0, (3, 3)),
        (Level(4, 2, 2), 8, 1.0, (5, 5)),
        (Level(4, 2, 2), 1, 0.25, (3.5, 3.5)),  # alone, nobody is padded
        (Level(0, 2, 6), 8, 0.5, (4, 7)),
    ],
)
def test_rows_that_are_verified(level: Level, requests: int, hits: float, rows: tuple[float, float]) -> None:
    """Per request: as many as are drafted, or as many as for the one with the most."""
    assert rows == (level.rows(requests, hits, ragged=True), level.rows(requests, hits, ragged=False))


def test_levels_go_from_nothing_to_everything() -> None:
    """Where the length of a copy is a matter of its own it is the longest; trees go without copies."""
    assert [Level(0, depth, depth) for depth in range(3)] == chains(2, copies=False, ragged=True)
    assert [Level(depth, depth, depth) for depth in range(3)] == chains(2, copies=True, ragged=False)
    assert [Level(), Level(2, 0, 0), Level(2, 1, 1), Level(2, 2, 2)] == chains(2, copies=True, ragged=True)
    assert [Level(), Level(0, 1, 2), Level(0, 2, 6)] == trees([2, 6])


def test_loads_that_count_as_alike() -> None:
    ends = [n for n in range(1, 70) if bucket_of(n) != bucket_of(n + 1)]

    assert [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64] == ends
    assert sorted(map(bucket_of, range(1, 200))) == list(map(bucket_of, range(1, 200)))
