"""The shape of a draft tree: which candidate of which head stands under which token."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Tree:
    """Nodes in an order in which each parent stands before its children; the root, the last token, is none."""

    parents: tuple[int, ...]  # each node's parent; -1 = the root
    ranks: tuple[int, ...]  # which of the candidates after its parent a node is; 0 = the likeliest
    depths: tuple[int, ...]  # tokens on the path from the root; 1 = drafted by the first head

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> Tree:
        """The tree of Medusa's choices: each is the path of ranks to one node, as in ((0,), (1,), (0, 0)).

        Raises `ValueError` with every path that is empty, twice there, negative, or whose parent is missing.
        """
        paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
        index = {path: number for number, path in enumerate(paths)}
        wrong = [f"{path} stands there twice" for number, path in enumerate(paths) if index[path] != number]
        for path in index:
            if not path or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
                wrong.append(f"{path} is no path of ranks (0 or more each)")
            elif len(path) > 1 and path[:-1] not in index:
                wrong.append(f"{path} has no parent: {path[:-1]} is missing")
        if not paths:
            wrong.append("there is no path in it")
        if wrong:
            raise ValueError(f"no draft tree: {'; '.join(wrong)}")
        return cls(
            tuple(index.get(path[:-1], -1) for path in paths),
            tuple(path[-1] for path in paths),
            tuple(map(len, paths)),
        )

    @classmethod
    def chain(cls, length: int) -> Tree:
        """The likeliest token after the likeliest token."""
        return cls(tuple(range(-1, length - 1)), (0,) * length, tuple(range(1, length + 1)))

    @property
    def depth(self) -> int:
        """The heads it needs."""
        return max(self.depths)

    @property
    def breadth(self) -> int:
        """The candidates per head that it needs."""
        return max(self.ranks) + 1

    def needs(self, heads: int, candidates: int) -> None:
        """Raise `ValueError` if it needs more heads, or more candidates of one head, than there are."""
        wrong = []
        if self.depth > heads:
            wrong.append(f"it is {self.depth} deep and there are {heads} heads")
        if self.breadth > candidates:
            wrong.append(f"it has rank {self.breadth - 1} and each head has {candidates} candidates (ranks from 0)")
        if wrong:
            raise ValueError(f"the draft tree does not fit the heads: {'; '.join(wrong)}")
