"""Drafts from a request's own text: what is copied, when it is trusted, and what is forgotten."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkllm_bridge.plugins.medusa import lookup as module
from chunkllm_bridge.plugins.medusa.lookup import LONGEST, MEMORY, WORTH, Lookup, Text

WORDS = st.lists(st.integers(0, 3), max_size=60)  # few different tokens: they repeat


@attrs.define
class Desk:
    """Requests and their texts, as an engine shows them; counts what was read."""

    texts: dict[str, list[int]] = attrs.field(factory=dict)
    lookup: Lookup = attrs.field(factory=Lookup)
    read: list[tuple[str, int]] = attrs.field(factory=list)

    def draft(self, count: int = 4, *, unread: Sequence[str] = ()) -> dict[str, list[int]]:
        ids = list(self.texts)

        def context(place: int, first: int) -> list[int] | None:
            self.read.append((ids[place], first))
            return None if ids[place] in unread else self.texts[ids[place]][first:]

        newest = [text[-1] for text in self.texts.values()]
        return dict(zip(ids, self.lookup.draft(ids, lambda: newest, context, count), strict=True))


def copied(text: Sequence[int], count: int = 4) -> list[int]:
    """What a fresh lookup copies for one request."""
    return Desk({"a": list(text)}).draft(count)["a"]


def reference(text: Sequence[int], count: int) -> list[int]:
    """The last place before the newest token where the two newest stood; what followed, read on into the copy."""
    for place in reversed(range(1, len(text) - 1)):
        if list(text[place - 1 : place + 1]) == list(text[-2:]):
            whole = list(text)
            for _ in range(count):
                whole.append(whole[place + 1 + len(whole) - len(text)])
            return whole[len(text) :]
    return []


class TestWhatIsCopied:
    @pytest.mark.parametrize(
        ("text", "copy"),
        [
            ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
            ([1, 2, 3, 9, 1, 2, 4, 9, 8, 7, 1, 2], [4, 9, 8, 7]),  # the last time, not the first
            ([5, 1, 2, 3, 9, 1, 2, 4, 9, 5, 1, 2], [4, 9, 5, 1]),  # nor the one where more of it matches
            ([1, 2, 3, 1, 2], [3, 1, 2, 3]),  # the copy reaches the newest token, and goes on with itself
            ([7, 7, 7], [7, 7, 7, 7]),
            ([1, 2, 1, 2], [1, 2, 1, 2]),
        ],
    )
    def test_what_followed_the_last_time(self, text: list[int], copy: list[int]) -> None:
        assert copy == copied(text)

    @pytest.mark.parametrize("text", [[1], [1, 1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 2], [2, 1, 3, 1, 2]])
    def test_nothing_where_the_text_is_new(self, text: list[int]) -> None:
        """One token that stood there before is too little; and the newest two are not their own past."""
        assert [] == copied(text)

    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_as_many_as_are_wanted(self, count: int) -> None:
        assert count == len(copied([1, 2, 3, 1, 2], count))

    @settings(deadline=None)
    @given(text=WORDS.filter(len), count=st.integers(1, 12))
    def test_it_is_the_plain_search(self, text: list[int], count: int) -> None:
        """As one who looks through the whole text every time."""
        assert reference(text, count) == copied(text, count)

    @settings(deadline=None)
    @given(pieces=st.lists(WORDS.filter(len), min_size=1, max_size=8))
    def test_it_reads_on(self, pieces: list[list[int]]) -> None:
        """Token by token or many at once, what is known is the same as of a text that is read in one go."""
        piecewise, whole = Text(), Text()
        for piece in pieces:
            piecewise.read(piece)
        whole.read([token for piece in pieces for token in piece])

        assert attrs.asdict(whole) == attrs.asdict(piecewise)

    def test_only_what_is_new_is_asked_for(self) -> None:
        """A step costs what it added and one token, however long the text is."""
        desk = Desk({"a": [1, 2, 3], "b": [4]})
        desk.draft()
        desk.texts["a"] += [4, 5]
        desk.texts["b"] += [6]
        desk.draft()

        assert [("a", 0), ("b", 0), ("a", 2), ("b", 0)] == desk.read

    def test_requests_know_their_own_text_only(self) -> None:
        desk = Desk({"a": [1, 2, 3, 4, 1, 2], "b": [1, 2], "c": [9, 1, 2, 5, 1, 2]})

        assert {"a": [3, 4], "b": [], "c": [5, 1]} == desk.draft(2)


class TestUnknown:
    def test_a_text_that_is_not_read_yet(self) -> None:
        """Nothing for it, and no look at the newest tokens: they may still be on a device. Others have theirs, and it
        has as soon as it is read."""

        def look() -> list[int]:
            raise AssertionError("nobody's text is known")

        assert [[], []] == Lookup().draft(["a", "b"], look, lambda place, first: None, 4)
        desk = Desk({"a": [1, 2, 3, 1, 2], "b": [4, 5, 6, 4, 5]})
        assert {"a": [], "b": [6, 4]} == desk.draft(2, unread="a")

        assert {"a": [3, 1], "b": [6, 4]} == desk.draft(2)

    def test_another_newest_token(self) -> None:
        """What the engine sampled is not what it shows: nothing is copied."""
        assert [[]] == Lookup().draft(["a"], lambda: [7], lambda place, first: [1, 2, 3, 1, 2][first:], 4)

    @pytest.mark.parametrize(
        "text", [[8, 9, 3, 8, 9], [8, 9], [8, 9, 3, 4, 5, 8, 9], [8, 9, 3, 4, 8, 9, 3], [8, 9, 8] * 9]
    )
    def test_a_request_that_begins_anew(self, text: list[int]) -> None:
        """Under the id of one before it: a shorter text costs a step without copies; none is mixed with the old one."""
        desk = Desk({"a": [1, 2, 3, 4, 1, 2]})
        desk.draft()
        desk.texts["a"] = [*text]
        first = desk.draft()["a"]
        assert first == (reference(text, 4) if len(text) > 5 else [])
        desk.texts["a"] += [8, 9]

        assert reference(desk.texts["a"], 4) == desk.draft()["a"]

    def test_a_step_that_is_looked_at_twice(self) -> None:
        """The same copies, and nothing is counted the second time."""
        desk = Desk({"a": [1, 2, 3, 4, 1, 2]})
        desk.draft()
        desk.texts["a"] += [3]
        found = [desk.draft()]
        before = repr(desk.lookup._counts)
        found.append(desk.draft())

        assert [{"a": [4, 1, 2, 3]}] * 2 == found
        assert before == repr(desk.lookup._counts)


class TestTrust:
    def serve(self, desk: Desk, steps: int, *, right: bool, numbers: random.Random) -> int:
        """Texts that repeat a pair of tokens, and then what followed or something new; copies made."""
        made = 0
        for step in range(steps):
            one, two, three = (numbers.randrange(10**9) for _ in range(3))
            name = f"{id(desk)} {step} {one}"
            desk.texts = {name: [one, two, three, one, two]}
            made += bool(desk.draft()[name])
            desk.texts[name] += [three if right else 0]
            desk.draft()
        return made

    def test_copies_that_are_never_right_end_and_come_back(self) -> None:
        """Before the bridge takes the plugin for useless; and once they are right again, though none was made
        meanwhile. How often is counted where one would have been made."""
        desk, numbers = Desk(), random.Random(1)
        wasted = self.serve(desk, 300, right=False, numbers=numbers)
        stopped = self.serve(desk, 20, right=False, numbers=numbers)
        self.serve(desk, MEMORY, right=True, numbers=numbers)
        back = self.serve(desk, 20, right=True, numbers=numbers)

        assert (True, 0, 20) == (wasted < 30, stopped, back)

    def test_texts_of_another_kind_end_copies_soon(self) -> None:
        """However many were right before, at every length: fewer than the 200 for which the bridge would take the whole
        plugin for useless."""
        lookup, made = Lookup(), {True: 0, False: 0}
        for right in (True, False):
            for number in range(3_000):
                same = range(10, 12 + number % (LONGEST - 1))
                desk = Desk({f"{right} {number}": [*same, 3, *same]}, lookup)
                made[right] += bool(desk.draft()[f"{right} {number}"])
                desk.texts[f"{right} {number}"] += [3 if right else 4]
                desk.draft()

        assert (3_000, True) == (made[True], made[False] < 150)

    @pytest.mark.parametrize("misleading", [2, LONGEST])
    def test_each_length_is_trusted_by_itself(self, misleading: int) -> None:
        """Two tokens that match by chance say nothing of eight, nor the other way round; beyond those it is all the
        same."""
        lookup = Lookup()

        def same(length: int) -> list[int]:
            return [*range(10, 10 + length), 3, *range(10, 10 + length)]

        for number in range(60):
            desk = Desk({f"{number}": same(misleading)}, lookup)
            desk.draft()
            desk.texts[f"{number}"] += [99]
            desk.draft()
        desk = Desk({"a": same(2), "b": same(LONGEST), "c": same(30)}, lookup)

        trusted = [bool(copy) for copy in desk.draft().values()]
        assert ([False, True, True] if misleading == 2 else [True, False, False]) == trusted
        assert lookup.share(misleading) < WORTH < lookup.share(5)

    @pytest.mark.parametrize("length", [2, 3, 7, 8, 12])
    def test_how_much_matches(self, length: int) -> None:
        """Counted back from the newest token, to the text's beginning at most."""
        text, start = Text(), Text()
        text.read([-1, *range(length), -2, *range(length)])
        start.read([*range(length), -2, *range(length)])

        assert min(LONGEST, length) == text.matched() == start.matched()

    @settings(deadline=None)
    @given(text=WORDS.filter(len))
    def test_how_much_matches_in_any_text(self, text: list[int]) -> None:
        found = Text()
        found.read(text)
        if found.guess is not None:
            before = text[: found.guess + 1]
            same = [size for size in range(1, len(before) + 1) if before[-size:] == text[-size:]]

            assert min(LONGEST, max(same)) == found.matched()

    def test_several_tokens_at_once_are_one_copy(self) -> None:
        """After a step with accepted drafts, the first of them says whether the copy would have been right."""
        desk = Desk({"a": [1, 2, 3, 4, 5, 1, 2]})
        desk.draft()
        desk.texts["a"] += [3, 4, 5]
        desk.draft()

        counts = desk.lookup._counts
        assert {2: [1.0, 1.0]} == {length: found for length, found in counts.items() if found[0]}


class TestMemory:
    def test_the_older_half_of_a_long_text_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is left is copied as before, at the right place; what is gone is not."""
        monkeypatch.setattr(module, "MOST", 100)
        desk = Desk({"a": [1, 2, *range(1_000, 1_097)]})
        desk.draft()
        desk.texts["a"] += [5, 1_090, 1_091]
        assert [1_092, 1_093] == desk.draft(2)["a"]
        desk.texts["a"] += [1, 2]

        assert [] == desk.draft(2)["a"]
        assert 54 >= len(desk.lookup._texts["a"].tokens)

    @pytest.mark.parametrize("most", [9, 16])
    @settings(deadline=None)
    @given(pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=8))
    def test_forgetting_loses_no_token(self, most: int, pieces: list[list[int]]) -> None:
        """Of those that are left: the text's end, at its place, and every pair findable."""
        text, whole = Text(), [token for piece in pieces for token in piece]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MOST", most)
            for piece in pieces:
                text.read(piece)

        assert len(text.tokens) <= most
        assert whole[text.first :] == text.tokens
        fresh = Text()
        fresh.read(text.tokens)
        assert (fresh.places, fresh.guess) == (text.places, text.guess)

    def test_those_not_asked_for_longest_go_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody says who ended; what all of them hold stays within bounds, and those at work are kept."""
        monkeypatch.setattr(module, "MOST_IN_ALL", 100)
        lookup = Lookup()
        for number in range(50):
            Desk({"stays": [*range(30 + number)][:40], f"{number}": [*range(10)]}, lookup).draft()
            assert lookup._held == sum(len(text.tokens) for text in lookup._texts.values()) <= 100

        assert ["44", "45", "46", "47", "48", "stays", "49"] == list(lookup._texts)

    def test_a_batch_is_never_forgotten_for_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """More than there is room for, all at work: it would be read anew at every step."""
        monkeypatch.setattr(module, "MOST_IN_ALL", 10)
        desk = Desk({"a": [1, 2, 3, 1, 2] * 4, "b": [4, 5, 6, 4, 5] * 4})
        desk.draft()
        desk.texts["a"] += [3]
        desk.texts["b"] += [6]
        desk.draft()

        assert [("a", 0), ("b", 0), ("a", 19), ("b", 19)] == desk.read

    def test_an_old_request_comes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It was forgotten, and is read from its beginning."""
        monkeypatch.setattr(module, "MOST_IN_ALL", 10)
        lookup = Lookup()
        for name in "ab":
            Desk({name: [1, 2, 3, 4, 5, 6, 1, 2]}, lookup).draft()

        assert [3, 4] == Desk({"a": [1, 2, 3, 4, 5, 6, 1, 2, 9, 1, 2, 3, 4, 7, 1, 2]}, lookup).draft(2)["a"]
