"""How drafts fared, counted."""

from __future__ import annotations

import pytest

from chunkllm_bridge.common import acceptance
from chunkllm_bridge.common.acceptance import BOUNDS, MOST_SOURCES, SLICE_SECONDS, SLICES, Acceptance
from chunkllm_bridge.common.testing import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted(clock: Clock) -> Acceptance:
    return Acceptance(clock)


def note(counted: Acceptance, ids: list[str], drafted: list[int], accepted: list[int], source: str = "heads") -> None:
    counted.note(ids, drafted, accepted, [source] * len(ids))


def test_every_position_is_counted(counted: Acceptance) -> None:
    """A draft right up to the third token was right at the first two as well."""
    note(counted, ["a", "b", "c"], [4, 4, 2], [3, 0, 1])

    assert (3, 10, 4) == tuple(counted.report()[key] for key in ("drafts", "draft_tokens", "accepted"))
    assert [2, 1, 1] == counted.report()["accepted_at"]
    assert 1 + 4 / 3 == counted.report()["acceptance_length"] == counted.report()["acceptance_length_total"]


def test_sources_are_counted_apart(counted: Acceptance) -> None:
    """And add up to the whole; a request without a draft counts for none."""
    counted.note(["a", "b", "c"], [4, 2, 0], [3, 0, 0], ["text", "heads", "nothing"])
    counted.note(["a", "b"], [1, 4], [1, 4], ["heads", "text"])

    assert {
        "text": {"drafts": 2, "draft_tokens": 8, "accepted": 7},
        "heads": {"drafts": 2, "draft_tokens": 3, "accepted": 1},
    } == counted.report()["sources"]
    assert (4, 11, 8) == tuple(counted.report()[key] for key in ("drafts", "draft_tokens", "accepted"))


def test_sources_without_end_have_one_name(counted: Acceptance) -> None:
    """A plugin that makes up names costs a few label values; those that were there first keep theirs."""
    for _ in range(2):
        for number in range(MOST_SOURCES + 50):
            note(counted, ["a"], [1], [1], f"s{number}")
    found = {name: count["drafts"] for name, count in counted.report()["sources"].items()}

    assert {**{f"s{number}": 2 for number in range(MOST_SOURCES)}, "other": 100} == found


def test_a_plain_decode_is_no_draft(counted: Acceptance) -> None:
    """Neither a step without drafts, nor a request without one beside others."""
    note(counted, ["a", "b"], [0, 0], [0, 0])
    note(counted, ["a", "b"], [2, 0], [2, 0])

    assert (1, 3.0, 0.0) == (counted.report()["drafts"], counted.of("a"), counted.of("b"))


def test_the_last_minute_is_the_last_minute(counted: Acceptance, clock: Clock) -> None:
    """What is older counts for the total only."""
    note(counted, ["a"], [4], [4])
    clock.advance(SLICES * SLICE_SECONDS)
    assert 0.0 == counted.recent
    note(counted, ["a"], [4], [0])

    assert (1.0, 3.0) == (counted.recent, counted.report()["acceptance_length_total"])


def test_a_request_is_counted_when_it_ends(counted: Acceptance) -> None:
    """Once, in the bucket of its own length; one that never had a draft in none."""
    note(counted, ["a", "b"], [4, 4], [1, 4])
    note(counted, ["a"], [4], [2])
    assert 0 == sum(count for count, _ in counted.report()["finished"])
    for name in ("a", "a", "b", "never"):
        counted.finished(name)

    found = {at: bucket for at, bucket in enumerate(counted.report()["finished"]) if bucket[0]}
    assert {BOUNDS.index(2.5): [1, 2.5], BOUNDS.index(5.0): [1, 5.0]} == found


def test_longer_than_every_bound_has_a_place(counted: Acceptance) -> None:
    note(counted, ["a"], [20], [20])
    counted.finished("a")

    assert [1, 21.0] == counted.report()["finished"][-1]


def test_forgotten_requests_do_not_pile_up(counted: Acceptance, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that never says who ended costs the oldest, not memory."""
    monkeypatch.setattr(acceptance, "MOST_REQUESTS", 3)
    for number in range(10):
        note(counted, [f"r{number}"], [1], [1])

    assert [0.0, 2.0] == [counted.of("r6"), counted.of("r7")]
    assert 3 == len(counted._requests)


def test_a_report_is_plain_data_of_its_own(counted: Acceptance) -> None:
    """Whoever changes it changes no count."""
    note(counted, ["a"], [1], [1])
    counted.report()["accepted_at"].append(9)
    counted.report()["finished"][0][0] = 9

    assert ([1], [0, 0.0]) == (counted.report()["accepted_at"], counted.report()["finished"][0])
