"""A plugin's own Config, filled from a spec: every field checked, nothing coerced."""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import attrs
from cattrs import Converter, transform_error
from cattrs.cols import is_any_set, is_sequence, list_structure_factory
from cattrs.errors import StructureHandlerNotFoundError

from chunkllm_bridge.common.values import Wrong, close_key, freeze, from_text, thaw, to_text, to_toml


class Mistake(NamedTuple):
    """One field that cannot be so."""

    field: str
    reason: str
    nearest: str | None = None
    unknown: bool = False  # the field itself; then `nearest` is a field too


def build(config_class: type, given: Mapping[str, Any]) -> Any:
    """The plugin's Config; `given` has passed `check`."""
    known = _fields(config_class)
    return config_class(**{field: _structured(value, known[field].type) for field, value in given.items()})


def check(config_class: type, given: Mapping[str, Any], reserved: Iterable[str]) -> list[Mistake]:
    """Everything wrong with these settings: unknown, missing, of another type, out of range.

    `reserved` names are the bridge's own under `plugins.<name>.`: they can be meant, and a Config cannot use them. A
    field bound to a parameter (`metadata={"parameter": ...}`) is filled by the host.
    """
    try:
        known = _fields(config_class)
    except Exception as error:
        return [Mistake("", f"its Config cannot be read: {error}")]
    strange = [field for field in given if field not in known]
    mistakes = [Mistake(field, "unknown key", close_key(field, [*known, *reserved]), unknown=True) for field in strange]
    heads = {name.partition(".")[0] for name in reserved}
    values, bound = {}, [field for field, attribute in known.items() if "parameter" in attribute.metadata]
    for field, attribute in known.items():
        if field in heads and field not in bound:
            mistakes.append(Mistake(field, "its Config uses a name that is the bridge's own"))
        elif field in given:
            try:
                values[field] = _checked(given[field], attribute)
            except Wrong as wrong:
                mistakes.append(Mistake(field, wrong.reason, wrong.nearest))
        elif attribute.default is attrs.NOTHING and field not in bound:
            mistakes.append(Mistake(field, f"is required ({_words(attribute.type)})"))
    if mistakes:
        return mistakes
    mistakes = list(_broken_validators(known, values))
    if not mistakes and all(known[field].default is not attrs.NOTHING or field in values for field in bound):
        try:
            config_class(**values)
        except Exception as error:
            mistakes.append(Mistake("", _first_line(error)))
    return mistakes


def _fields(config_class: type) -> dict[str, attrs.Attribute[Any]]:
    """By the name under which __init__ takes them."""
    attrs.resolve_types(config_class)
    return {field.alias or field.name: field for field in attrs.fields(config_class) if field.init}


def _checked(value: Any, attribute: attrs.Attribute[Any]) -> Any:
    freeze(value)
    try:
        return _structured(value, attribute.type)
    except StructureHandlerNotFoundError:
        raise Wrong(f"its Config has a type that no spec can write: {_words(attribute.type)}") from None
    except Exception as error:
        details = _detail(error)
        raise Wrong(f"must be {_words(attribute.type)}{details}", _meant(value, attribute.type)) from error


def _structured(value: Any, kind: Any) -> Any:
    return thaw(value) if kind in (None, Any) else _STRICT.structure(thaw(value), kind)


def _meant(value: Any, kind: Any) -> str | None:
    """3 for "3", and "3" for 3, where that would be right."""
    other = from_text(value) if isinstance(value, str) else to_text(value)
    with suppress(Exception):
        _STRICT.structure(other, kind)
        return to_toml(other)
    return None


def _broken_validators(known: Mapping[str, attrs.Attribute[Any]], values: Mapping[str, Any]) -> Iterable[Mistake]:
    """attrs stops at the first; a stand-in for the instance lets us ask each of them."""
    stand_in = SimpleNamespace(**{known[field].name: value for field, value in values.items()})
    for field, value in values.items():
        attribute = known[field]
        if attribute.validator is None or attribute.converter is not None:
            continue
        try:
            attribute.validator(stand_in, attribute, value)
        except AttributeError:
            continue  # it asks for more than the stand-in has; building the Config will ask it again
        except Exception as error:
            yield Mistake(field, _first_line(error))


def _first_line(error: Exception) -> str:
    text = str(error.args[0]) if error.args else type(error).__name__
    return text.splitlines()[0] if text else type(error).__name__


def _words(kind: Any) -> str:
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", None: "anything"}
    return plain.get(kind) or (kind.__name__ if type(kind) is type else re.sub(r"\b(\w+\.)+", "", str(kind)))


def _detail(error: Exception) -> str:
    """Where inside a list or a table it goes wrong; nothing for a plain value."""
    inside = [line for line in transform_error(error) if "$[" in line or "$." in line]
    return f" ({'; '.join(inside)})" if inside else ""


# --- cattrs, without its kindness -------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, bytes, NoneType)


def _is_list(kind: Any) -> bool:
    return is_sequence(kind) or is_any_set(kind) or (get_origin(kind) or kind) is tuple


def _is_choice(kind: Any) -> bool:
    """A Literal, or a union of Literals and plain types."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,) if get_origin(kind) is Literal else ()
    return bool(parts) and all(part in _PLAIN or get_origin(part) is Literal for part in parts)


def _plain(value: Any, kind: Any) -> Any:
    if issubclass(kind, Enum):  # StrEnum, IntEnum
        return kind(value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"expected {_words(kind)}")
    return kind(value)


def _choice(value: Any, kind: Any) -> Any:
    parts = (kind,) if get_origin(kind) is Literal else get_args(kind)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if type(value) in parts or any(type(value) is type(word) and value == word for word in words):
        return value
    if type(value) is int and float in parts:
        return float(value)
    raise TypeError(f"expected {_words(kind)}")


def _list_of(kind: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    """A text is not a list of letters."""
    origin = get_origin(kind) or kind
    parts = get_args(kind) or (Any, ...)
    fixed = [] if origin is not tuple or ... in parts else [converter.get_structure_hook(part) for part in parts]
    every = list_structure_factory(list[parts[0]], converter)  # type: ignore[valid-type]  # made while running
    into: Callable[[Any], Any] = (
        tuple if origin in (tuple, abc.Sequence) else list if is_sequence(kind) else set if origin is set else frozenset
    )

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError("expected a list")
        if not fixed:
            return into(every(value, list))
        if len(value) != len(fixed):
            raise ValueError(f"expected {len(fixed)} values")
        return tuple(hook(each, part) for hook, each, part in zip(fixed, value, parts, strict=True))

    return structure


def _strict() -> Converter:
    """TOML has types; a Config gets the ones it declares. (A whole number is a number.)"""
    converter = Converter(forbid_extra_keys=True, use_alias=True)
    for kind in _PLAIN[:-1]:
        converter.register_structure_hook(kind, _plain)
    converter.register_structure_hook_func(_is_choice, _choice)
    converter.register_structure_hook_factory(_is_list)(_list_of)
    return converter


_STRICT = _strict()
