"""What somebody wrote, key by key, with the place where it stands: a TOML file, a launch line, a live change."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from chunkllm_bridge.common.errors import Problem
from chunkllm_bridge.common.parameters import PARAMETERS
from chunkllm_bridge.common.values import close, close_key, from_text

Keys = tuple[str, ...]  # a dotted key, taken apart
DEEPEST = 20  # parts of a key; no parameter has so many

_TOKEN = re.compile(
    r"(?P<comment>\#[^\n]*)"
    r'|(?P<string>"{3}(?:\\.|[^\\])*?"{3,5}|' + r"'{3}.*?'{3,5}" + r'|"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*')"
    r"|(?P<newline>\n)|(?P<open>[\[{])|(?P<close>[\]}])|(?P<equals>=)|(?P<bare>[A-Za-z0-9_-]+)|.",
    re.DOTALL,
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@attrs.frozen
class Source:
    """Where a value comes from."""

    kind: Literal["file", "set", "profile", "default", "live"]
    detail: str = ""  # "chunkllm.toml:12", "cpu"

    def __str__(self) -> str:
        match self.kind:
            case "file":
                return self.detail
            case "set":
                return "--plugin-set"
            case "profile":
                return f"profile {self.detail}"
            case "default":
                return "default"
            case "live":
                return "set while serving"


@attrs.frozen
class Given:
    """One key as it was written."""

    keys: Keys
    value: Any
    source: Source

    @property
    def key(self) -> str:
        return dotted(self.keys)


def dotted(keys: Keys) -> str:
    """As TOML would write it: a name with a dot in it is not two names."""
    return ".".join(name if _BARE.fullmatch(name) else f'"{name}"' for name in keys)


def leaves(table: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Tables are opened down to the keys that a parameter can have; a plugin's own tables stay whole."""
    for name, value in table.items():
        keys = (*above, name)
        if isinstance(value, Mapping) and value and _is_group(keys):
            yield from leaves(value, keys)
        else:
            yield keys, value


def _is_group(keys: Keys) -> bool:
    if len(keys) > DEEPEST:
        return False
    if keys[0] == "plugins":
        return len(keys) < 3 or keys[2:] in (("cache",), ("latency",))
    return dotted(keys) not in PARAMETERS


def read_file(file: Path | None, text: str | None, problems: list[Problem]) -> list[Given]:
    """The keys of a spec file; `text` stands in for its content where that is at hand."""
    if file is None and text is None:
        return []
    name = file.name if file else "spec"
    try:
        content = file.read_bytes().decode("utf-8-sig") if file and text is None else text or ""
        table = tomllib.loads(content)
    except OSError as error:
        problems.append(_unreadable(file or Path(name), error))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problems.append(Problem(key="the text", value=None, reason="is not UTF-8", where=f"{name}:{line}"))
    except (ValueError, RecursionError) as error:
        problems.append(_not_toml(name, content, error))
    else:
        where = statements(content)
        found = sorted(((line_of(keys, where), keys, value) for keys, value in leaves(table)), key=lambda each: each[0])
        return [Given(keys, value, Source("file", f"{name}:{line}")) for line, keys, value in found]
    return []


def _unreadable(file: Path, error: OSError) -> Problem:
    beside = [path.name for path in file.parent.glob("*.toml")] if isinstance(error, FileNotFoundError) else []
    reason = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return Problem(key=str(file), value=None, reason=reason, where="spec file", nearest=close(file.name, beside))


def _not_toml(name: str, text: str, error: Exception) -> Problem:
    lines = text.splitlines() or [""]
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
    line = min(int(found[1]), len(lines)) if found and found[1] else len(lines)
    reason = "tables within tables without end" if isinstance(error, RecursionError) else str(error)
    before = [(keys, at) for keys, at in statements(text) if at <= line]
    if re.match("Cannot (overwrite|declare|mutate)", reason) and before:  # tomllib stands at the statement's end
        keys, line = before[-1]
        first = line_of(keys, before)
        reason, key = f"given twice, first on line {first}" if first < line else reason, dotted(keys)
    else:
        key, reason = lines[line - 1].strip(), f"is not TOML: {reason[: found.start()] if found else reason}"
    return Problem(key=key, value=None, reason=reason, where=f"{name}:{line}")


def read_sets(sets: Sequence[str], problems: list[Problem], source: Source) -> list[Given]:
    """KEY=VALUE, where VALUE is TOML or bare words; each key once."""
    given: list[Given] = []
    for item in sets:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not key or not text:
            known = close_key(re.split(r"[\s:=]", item.strip())[0], PARAMETERS)
            nearest = f"{known}=VALUE" if known else None
            reason = "must be KEY=VALUE" if not equals or not key else 'has no value (an empty text is KEY="")'
            problems.append(Problem(key=item, value=None, reason=reason, where=str(source), nearest=nearest))
            continue
        for keys, value in leaves(_nested(tuple(key.split(".")), from_text(text))):
            new = Given(keys, value, source)
            if any(old.keys == new.keys and _same_part(old.value, new.value) for old in given):
                problems.append(Problem(key=new.key, value=value, reason="given twice", where=str(source)))
            given.append(new)
    return given


def _same_part(old: Any, new: Any) -> bool:
    """The parts of one table may come one by one, each once."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old and new:
        return any(_same_part(old[name], new[name]) for name in old.keys() & new.keys())
    return True


def read_mapping(values: Mapping[str, Any], source: Source) -> list[Given]:
    """{"kv_cache.memory_ratio": 0.3}, as a control message carries it."""
    nested = (_nested(tuple(key.split(".")), value) for key, value in values.items())
    return [Given(keys, value, source) for table in nested for keys, value in leaves(table)]


def _nested(keys: Keys, value: Any) -> dict[str, Any]:
    for name in reversed(keys):
        value = {name: value}
    return value  # type: ignore[no-any-return]  # a key has a part at least


# --- lines, which tomllib does not tell -------------------------------------------------------------------------------


def statements(text: str) -> list[tuple[Keys, int]]:
    """Every table header and every key of a TOML text with its line; on a broken text, as far as it makes sense."""
    found: list[tuple[Keys, int]] = []
    table: Keys = ()
    names: list[str] = []
    reading, depth, line = "key", 0, 1
    for token in _TOKEN.finditer(f"{text}\n"):
        kind, word = token.lastgroup, token[0]
        match reading, kind:
            case "key", "open" if not names:
                reading = "header"
            case (("key" | "header"), ("bare" | "string")):
                names.append(word if kind == "bare" else str(from_text(word)))
            case "key", "equals":
                found.append(((*table, *names), line))
                reading, names, depth = "value", [], 0
            case "header", "newline":
                table = tuple(names)
                found.append((table, line))
                reading, names = "key", []
            case "key", "newline":
                names = []
            case "value", ("open" | "close"):
                depth += 1 if kind == "open" else -1
            case "value", "newline" if depth <= 0:
                reading = "key"
        line += word.count("\n")
    return found


def line_of(keys: Keys, where: Sequence[tuple[Keys, int]]) -> int:
    """The line of this key, or of the nearest table around it."""
    for depth in range(len(keys), 0, -1):
        for found, line in where:
            if found[:depth] == keys[:depth]:
                return line
    return 1
