"""The exception tree. Everything that people can cause is a `BridgeError`; anything else that escapes is a bug."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


class BridgeError(Exception):
    """Something a person can mend: the message says what, where and what instead."""

    exit_code = 1


@attrs.frozen(kw_only=True)
class Problem:
    """One mistake in a spec."""

    key: str  # the dotted name as written, e.g. "kv_cache.memory_ratio"
    value: object  # what was given; None for a key that is unknown as a whole
    reason: str  # why it cannot be, with the limit broken
    where: str  # "chunkllm.toml:12", "--plugin-set", "profile consumer"
    nearest: str | None = None  # the right key or value that is closest

    def __str__(self) -> str:
        hint = f" (did you mean {self.nearest}?)" if self.nearest else ""
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.where}: {self.key}{shown}: {self.reason}{hint}"


class ConfigError(BridgeError):
    """A spec that cannot be used; carries every mistake in it, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{count} mistake{'s' if count != 1 else ''} in the plugin spec:"
        super().__init__("\n  ".join([head, *map(str, self.problems)]))


class IncompatibleError(BridgeError):
    """A plugin, an engine or a machine that do not go together; lists every reason."""

    exit_code = 2

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        self.name = name
        self.reasons = tuple(reasons)
        super().__init__("\n  ".join([f"{name} cannot be attached:", *self.reasons]))


class PatchError(BridgeError):
    """An engine symbol that is not the one a patch was written against."""


class QuotaError(BridgeError):
    """A lease beyond its quota, or books that do not add up; names the owner."""


class ControlError(BridgeError):
    """A command that the running engine refused; `status` is the HTTP status that says so."""

    def __init__(self, message: str, status: int = 400, problems: Sequence[str] = ()) -> None:
        self.status = status
        self.problems = tuple(problems)  # each mistake in what was given
        if status in (400, 422):  # what was given is wrong, as in a spec file
            self.exit_code = 2
        super().__init__(message)
