"""Drafts from the request's own text: what followed the last time that its two newest tokens stood there.

Answers repeat names, phrases, lines of code, and the question. A copy costs no pass over any weights, and is right more
often than what heads draft; where the text is new, the heads draft (copying alone: LLMA, arXiv 2304.04487; beside
trained drafters: SAM decoding, arXiv 2411.10666).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs

SOURCE = "text"  # what such drafts are counted as
LONGEST = 8  # newest tokens that are compared with those before
WORTH = 0.35  # share of copies whose first token was right below which none is made: heads do as well
PRIOR, PRIOR_WEIGHT = 0.6, 20.0  # of a share, before anything is known
MEMORY = 500  # copies over which a share is taken
RECENT = 60  # the same for all copies that are trusted: where texts are of another kind now, they end soon
MOST = 32_768  # tokens of one request that are remembered; then the older half is forgotten
MOST_IN_ALL = 262_144  # of all requests; then those who were not asked for longest are forgotten

Context = Callable[[int, int], Sequence[int] | None]


@attrs.define
class Text:
    """What is known of a request."""

    first: int = 0  # tokens before these, forgotten
    tokens: list[int] = attrs.field(factory=list)
    places: dict[tuple[int, int], int] = attrs.field(factory=dict)  # two tokens -> where the second stood last
    guess: int | None = None  # the place that the newest token was found at before

    def read(self, more: Sequence[int]) -> None:
        """More tokens, the newest last."""
        if len(self.tokens) + len(more) > MOST:
            tokens = [*self.tokens, *more]
            self.first += len(tokens) - MOST // 2
            self.tokens, self.places, more = [], {}, tokens[-(MOST // 2) :]
        tokens, places = self.tokens, self.places
        begin = max(len(tokens) - 1, 1)  # the newest pair becomes findable once there is a newer one
        tokens += more
        for place in range(begin, len(tokens) - 1):
            places[tokens[place - 1], tokens[place]] = place
        self.guess = places.get((tokens[-2], tokens[-1])) if len(tokens) > 1 else None

    def matched(self) -> int:
        """How many of the newest tokens stood at the guess, at most `LONGEST`."""
        assert self.guess is not None
        tokens, newest, length = self.tokens, len(self.tokens) - 1, 2
        while length < min(LONGEST, self.guess + 1) and tokens[self.guess - length] == tokens[newest - length]:
            length += 1
        return length

    def after(self, count: int) -> list[int]:
        """`count` tokens that followed the guess; a copy that reaches the newest token goes on with itself."""
        assert self.guess is not None
        period = len(self.tokens) - 1 - self.guess
        return [self.tokens[self.guess + 1 + at % period] for at in range(count)]


class Lookup:
    """`draft` copies. How often copies are right is seen in every step, whether or not one was drafted."""

    def __init__(self) -> None:
        self._texts: dict[str, Text] = {}  # the one asked for last is the last
        self._held = 0  # tokens in all of them
        self._recent = [0.0, 0.0]  # copies, right ones
        self._counts = {length: [0.0, 0.0] for length in range(2, LONGEST + 1)}  # matched -> copies, right ones

    def draft(
        self, request_ids: Sequence[str], newest: Callable[[], Sequence[int]], context: Context, count: int
    ) -> list[list[int]]:
        """Per request `count` tokens, or none: where the text is new or not known, or where copies do not pay.

        `newest` gives the requests' newest tokens; it may wait for a device, and is called once, if a text is known.
        """
        newest = functools.cache(newest)
        drafts: list[list[int]] = []
        for place, request_id in enumerate(request_ids):
            text = self._up_to_date(request_id, place, newest, context)
            found = text is not None and text.guess is not None and self._trusts(text.matched())
            drafts.append(text.after(count) if text is not None and found else [])
        while self._held > MOST_IN_ALL and len(self._texts) > len(request_ids):
            self._held -= len(self._texts.pop(next(iter(self._texts))).tokens)
        return drafts

    def share(self, matched: int) -> float:
        """Of the copies made where so many tokens matched, those whose first token is right."""
        return _share(self._counts[matched])

    def _trusts(self, matched: int) -> bool:
        return min(self.share(matched), _share(self._recent)) >= WORTH

    def _up_to_date(
        self, request_id: str, place: int, newest: Callable[[], Sequence[int]], context: Context
    ) -> Text | None:
        """The request's text up to its newest token; a step that is looked at twice changes nothing the second time."""
        text = self._texts.pop(request_id, None) or Text()
        self._held -= len(text.tokens)
        known = text.first + len(text.tokens)
        more = context(place, max(0, known - 1))  # with the last known one: another text may go by that id now
        if more and known and more[0] != text.tokens[-1]:
            text, known, more = Text(), 0, context(place, 0)
        if not more or more[-1] != newest()[place]:
            return None
        if known:
            more = more[1:]
            self._compare(text, more)
        if more:
            text.read(more)
        self._texts[request_id] = text
        self._held += len(text.tokens)
        return text

    def _compare(self, text: Text, more: Sequence[int]) -> None:
        """Hold what would have been copied first against what came."""
        if text.guess is None or not more:
            return
        right = text.after(1)[0] == more[0]
        kinds = [(self._counts[text.matched()], MEMORY)]
        if self.share(text.matched()) >= WORTH:
            kinds.append((self._recent, RECENT))
        for counts, memory in kinds:
            counts[0] += 1 - counts[0] / memory
            counts[1] += right - counts[1] / memory


def _share(counts: Sequence[float]) -> float:
    copies, right = counts
    return (right + PRIOR * PRIOR_WEIGHT) / (copies + PRIOR_WEIGHT)
