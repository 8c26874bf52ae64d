"""How much may be drafted in a step: the choices that the pace has."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Level:
    """Draft tokens per request."""

    copied: int = 0  # for those whose text tells what comes
    drafted: int = 0  # for the others, by heads, on one path
    nodes: int = 0  # for the others, in all: more than `drafted` in a tree

    def rows(self, requests: float, hits: float, *, ragged: bool) -> float:
        """Rows that are verified per request, of whom the share `hits` is copied for. Ragged: as many as are drafted;
        else as many for each as for the one with the most."""
        if ragged or requests < 2:
            return 1 + hits * self.copied + (1 - hits) * self.nodes
        return 1 + max(self.copied if hits else 0, self.nodes)

    def within(self, most: int) -> Level:
        return self if self.copied <= most else attrs.evolve(self, copied=most)


def chains(most: int, *, copies: bool, ragged: bool) -> list[Level]:
    """Up to `most` tokens. A copy is cheap and often right: where its length is a matter of its own, it is long."""
    if copies and ragged:
        return [Level(), *(Level(most, depth, depth) for depth in range(most + 1))]
    return [Level(depth if copies else 0, depth, depth) for depth in range(most + 1)]


def trees(nodes: Sequence[int]) -> list[Level]:
    """`nodes`: how many there are down to each depth, from 1 on. Copies are chains: trees go without."""
    return [Level(), *(Level(0, depth, count) for depth, count in enumerate(nodes, 1))]
