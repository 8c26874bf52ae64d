"""Verbs on every rank of a tensor-parallel group, while all of its schedulers handle the same command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Handle = Callable[[str, Mapping[str, Any] | None], dict[str, Any]]


class Ranks:
    """The first rank calls and dismisses; the others follow until they are dismissed.

    `group` is SGLang's `GroupCoordinator`; its CPU group (gloo) carries the words, never the device's.
    """

    def __init__(self, group: Any, handle: Handle) -> None:
        self._group, self._handle = group, handle
        self._first = int(group.ranks[0])
        self.leads = group.rank_in_group == 0

    def call(self, verb: str, wire: Mapping[str, Any] | None = None) -> Sequence[Mapping[str, Any]]:
        """The verb on every rank; the answers in rank order."""
        self._tell((verb, wire))
        return self._gather(self._handle(verb, wire))

    def dismiss(self) -> None:
        """Let the others go on; once per command, whatever came of it."""
        self._tell(None)

    def follow(self) -> None:
        """Do what the first rank says until it dismisses us."""
        while (told := self._hear()) is not None:
            self._gather(self._handle(*told))

    def _tell(self, words: tuple[str, Mapping[str, Any] | None] | None) -> None:
        if self._group.world_size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list([words], src=self._first, group=self._group.cpu_group)

    def _hear(self) -> tuple[str, Mapping[str, Any] | None] | None:
        import torch.distributed as dist

        words: list[Any] = [None]
        dist.broadcast_object_list(words, src=self._first, group=self._group.cpu_group)
        return words[0]  # type: ignore[no-any-return]

    def _gather(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        if self._group.world_size == 1:
            return [answer]
        import torch.distributed as dist

        answers: list[Any] = [None] * self._group.world_size
        dist.gather_object(answer, answers if self.leads else None, dst=self._first, group=self._group.cpu_group)
        return answers
