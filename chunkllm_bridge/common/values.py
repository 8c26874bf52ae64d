"""How a value is written and what it then means: text, shares, sizes, durations, names."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from difflib import SequenceMatcher, get_close_matches
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
_SPANS = {"min": Decimal(60), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "h": Decimal(3600), "s": Decimal(1)}
_SPANS |= {"d": Decimal(86400)}
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*)")

LONGEST_WORD = 200  # characters that are compared in search of the nearest right word: the time grows with their square

Reader = Callable[[object], Any]  # the value as written -> the value in effect, or Wrong


class Wrong(ValueError):
    """A value that cannot be, with the nearest right one as it would be written."""

    def __init__(self, reason: str, nearest: str | None = None) -> None:
        self.reason, self.nearest = reason, nearest
        super().__init__(reason)


def close(word: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(word[:LONGEST_WORD], list(known), n=1)), None)


def close_key(key: str, known: Iterable[str]) -> str | None:
    """The known key most like this one as a whole or in its last part; ties go to the earlier."""

    def likeness(other: str) -> float:
        whole = SequenceMatcher(None, key.lower(), other).ratio()
        tail = SequenceMatcher(None, key.lower().rpartition(".")[2], other.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * tail)

    key = key[:LONGEST_WORD]
    best = max(known, key=likeness, default="")
    return best if best and likeness(best) > 0.6 else None


# --- text and structure -----------------------------------------------------------------------------------------------


def from_text(text: str) -> object:
    """What a launch line means by this text: a TOML value, or else the bare words."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return table["value"] if len(table) == 1 else text.strip()


def to_text(value: object) -> str:
    """The shortest text that `from_text` reads back as this value."""
    if isinstance(value, str | Path):
        word = str(value)
        return word if word and from_text(word) == word else _quoted(word)
    return to_toml(value)


def to_toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(name)} = {to_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def freeze(value: Any) -> Any:
    """A plugin's own value, made unchangeable; only what JSON can carry to the other processes."""
    if isinstance(value, Mapping):
        return MappingProxyType({name: freeze(inner) for name, inner in value.items()})
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    if isinstance(value, float) and not math.isfinite(value):
        raise Wrong("must be a finite number")
    if not isinstance(value, bool | int | float | str):
        raise Wrong(f"a {type(value).__name__} cannot be carried to every process; write it as text")
    return value


def thaw(value: Any) -> Any:
    """A copy that JSON can write and anybody may change."""
    if isinstance(value, Mapping):
        return {name: thaw(inner) for name, inner in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [thaw(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


# --- readers and their opposites --------------------------------------------------------------------------------------


def one_of(*words: str) -> Reader:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise Wrong(f"must be {' or '.join(words)}", close(str(value), words))
        return value

    return read


def name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise Wrong("must be a name")
    return value


def name_or_none(value: object) -> str | None:
    return None if value == "none" else name(value)


def show_or_none(value: object) -> str:
    return "none" if value is None else to_text(value)


def names(value: object) -> frozenset[str] | str:
    if value in ("all", "everything"):
        return str(value)
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) and each for each in given):
        raise Wrong("must be a name, a list of names, all, everything or none")
    if word := next((word for word in ("all", "everything", "none") if word in given and len(given) > 1), None):
        raise Wrong(f"{word} stands alone", f'"{word}"')
    return names(given[0]) if given and given[0] in ("all", "everything") else frozenset(given) - {"none"}


def show_names(value: frozenset[str] | str) -> str:
    if isinstance(value, str):
        return value
    given = sorted(value)
    return to_toml(given) if len(given) > 1 else to_text(given[0]) if given else "none"


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        guess = {"true": "true", "yes": "true", "1": "true", "false": "false", "no": "false", "0": "false"}
        raise Wrong("must be true or false", guess.get(str(value).lower()))
    return value


def whole(low: int, high: int | None = None) -> Reader:
    limits = f"must be a whole number from {low}" + (" up" if high is None else f" to {high}")

    def read(value: object) -> int:
        if isinstance(value, float) and value.is_integer() and low <= value <= (high or value):
            raise Wrong(limits, str(int(value)))
        if isinstance(value, bool) or not isinstance(value, int):
            raise Wrong(limits)
        if value < low or (high is not None and value > high):
            raise Wrong(limits, str(low if value < low else high))
        return value

    return read


def rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise Wrong("must be a number from 0 to 1", _hundredth(value))
    return float(value)


def share(word: str, meaning: str | None) -> Reader:
    def read(value: object) -> float | str | None:
        if value == word:
            return meaning
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            nearest = _hundredth(value) or (close(value, [word]) if isinstance(value, str) else None)
            raise Wrong(f"must be {word} or a number above 0 and at most 1", nearest)
        return float(value)

    return read


def _hundredth(value: object) -> str | None:
    """40 and "40%" were meant as 0.4."""
    percent = re.fullmatch(r"([0-9]{1,3}) ?%?", str(value))
    return repr(int(percent[1]) / 100) if percent and 1 < int(percent[1]) <= 100 else None


def size(value: object) -> int:
    reason = 'must be a size above 0: bytes, or a number with a unit like "8GiB"'
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise Wrong(reason)
    number, unit = found.groups()
    if unit not in _SIZES:
        right = next((known for known in _SIZES if unit.lower() in (known.lower(), known[0].lower())), None)
        raise Wrong(reason, f'"{number}{right}"' if right else None)
    exact = Fraction(number) * _SIZES[unit]
    if exact <= 0 or exact.denominator != 1:
        raise Wrong(reason)
    return int(exact)


def show_size(value: int) -> str:
    unit = next(unit for unit, length in _SIZES.items() if value % length == 0)
    return str(value) if unit == "B" else f"{value // _SIZES[unit]}{unit}"


def span(usual: str, *, off: bool = False, below: float = math.inf) -> Reader:
    """A duration in seconds. A bare number is refused: nobody can tell seconds from milliseconds."""
    reason = 'must be {}a duration{} with a unit, like "10ms" or "24h"'.format(
        *(("off or ", "") if off else ("", " above 0"))
    )

    def read(value: object) -> float | None:
        if off and value == "off":
            return None
        found = _QUANTITY.fullmatch(value if isinstance(value, str) else _plain(value))
        if found is None:
            raise Wrong(reason, close(value, ["off"]) if off and isinstance(value, str) else None)
        number, unit = found.groups()
        if unit not in _SPANS:
            raise Wrong(reason, f'"{number}{_unit_meant(number, unit, usual)}"')
        seconds = float(Decimal(number) * _SPANS[unit])
        if seconds == 0 and not off:
            raise Wrong(reason)
        if seconds >= below:
            raise Wrong(f"must be below {show_span(below)}")
        return seconds or None

    return read


def _plain(value: object) -> str:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _unit_meant(number: str, unit: str, usual: str) -> str:
    if not unit:  # 0.01 was meant in seconds, 10 in the parameter's usual unit
        return "s" if 0 < Decimal(number) < 1 else usual
    if unit == "m" and usual != "ms":
        return "min"
    return next((known for known in _SPANS if unit.lower().startswith(known)), usual)


def show_span(value: float | None) -> str:
    if value is None:
        return "off"
    exact = Decimal(repr(value))
    unit = next((unit for unit in ("h", "min", "s", "ms") if exact % _SPANS[unit] == 0), "us")
    return f"{exact / _SPANS[unit]:f}".removesuffix(".0") + unit


def folder(value: object) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise Wrong("must be a folder's path")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise Wrong(str(error)) from None
