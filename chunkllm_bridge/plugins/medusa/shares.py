"""How often drafts are right, by what drafted them and by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from chunkllm_bridge.plugins.medusa.levels import Level

MEMORY = 400  # drafts over which a position's share of right ones is taken
PRIOR, PRIOR_WEIGHT = 0.6, 6.0  # of a position that was never tried
HITS = 0.2  # share of requests that there is a copy for, before anything is known


@attrs.define
class Shares:
    """`learn` and `seen` look at steps, `gain` looks ahead."""

    drafts: int = 0  # of the heads
    hits: float = HITS
    _heads: list[list[float]] = attrs.field(factory=list)  # position -> drafts that got there, those right there
    _copies: list[list[float]] = attrs.field(factory=list)

    def learn(self, reached: int, right: int, is_copy: bool) -> None:
        """A draft of `reached` tokens, the first `right` of which the model agreed with."""
        positions = self._copies if is_copy else self._heads
        self.drafts += not is_copy
        positions += ([0.0, 0.0] for _ in range(reached - len(positions)))
        for position in range(min(reached, right + 1)):
            counts = positions[position]
            counts[0] += 1 - counts[0] / MEMORY
            counts[1] += (right > position) - counts[1] / MEMORY

    def seen(self, copied: Sequence[bool], most: int) -> None:
        """For which requests of a step there was a copy, if up to `most` > 0 tokens of one were wanted."""
        if most:
            for found in copied:
                self.hits += (found - self.hits) / MEMORY

    def gain(self, level: Level) -> float:
        """Tokens that a step is expected to yield per request."""
        if not level.copied:
            return 1 + _path(self._heads, level.drafted)
        copies, heads = _path(self._copies, level.copied), _path(self._heads, level.drafted)
        return 1 + self.hits * copies + (1 - self.hits) * heads

    def snapshot(self) -> dict[str, Any]:
        return attrs.asdict(self)

    def migrate(self, state: Mapping[str, Any]) -> None:
        self.drafts, self.hits = state["drafts"], state["hits"]
        self._heads, self._copies = ([list(each) for each in state[name]] for name in ("_heads", "_copies"))


def _path(positions: Sequence[Sequence[float]], reached: int) -> float:
    """Tokens expected to be right of so many."""
    expected, path = 0.0, 1.0
    for position in range(reached):
        tried, right = positions[position] if position < len(positions) else (0.0, 0.0)
        path *= (right + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
        expected += path
    return expected
