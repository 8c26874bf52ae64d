"""A spec against its parameters, the plugins and the machine: every mistake becomes a Problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import attrs

from chunkllm_bridge.common import configs
from chunkllm_bridge.common.errors import BridgeError, Problem
from chunkllm_bridge.common.parameters import (
    BUILT_IN,
    EACH,
    HOT_RELOAD,
    OWN_ATTENTION,
    PARAMETERS,
    Parameter,
    live_keys,
)
from chunkllm_bridge.common.profiles import Hardware, Profile, choose
from chunkllm_bridge.common.values import Wrong, close, close_key, freeze
from chunkllm_bridge.common.written import Given, Keys, Source, dotted


@attrs.frozen
class Value:
    """A value in effect and where it comes from."""

    value: Any
    source: Source


# Parameters; `plugins.<name>` (an empty table: "active"); `plugins.<name>.<key>`.
Values = Mapping[str, Value]


class Catalogue(Protocol):
    """The plugins that can be named."""

    @property
    def refused(self) -> Mapping[str, str]: ...  # installed, but cannot be named: name -> why
    def names(self) -> Sequence[str]: ...
    def needs_accelerator(self, name: str) -> bool: ...
    def seams(self, name: str) -> frozenset[str]: ...
    def config_class(self, name: str) -> type: ...


def parameter_of(key: str | Keys) -> Parameter | None:
    """The parameter that rules this key; None for a plugin's own."""
    keys = tuple(key.split(".")) if isinstance(key, str) else key
    return EACH.get(dotted(keys[2:])) if keys[0] == "plugins" else PARAMETERS.get(dotted(keys))


def active(values: Values, drafter: str | None = None) -> tuple[str, ...]:
    """Plugins with a table of their own, then those that a parameter names, then the draft source of the launch: while
    drafting is turned off it keeps its seat."""
    tables = [key.removeprefix("plugins.") for key in values if key.startswith("plugins.") and key.count(".") == 1]
    named = (values["attention.plugin"].value, values["speculative.plugin"].value)
    names = [*tables, *(name for name in (*named, drafter) if name not in (*OWN_ATTENTION, None))]
    return tuple(dict.fromkeys(names))


def own(values: Values, name: str) -> dict[str, Value]:
    """What stands under `plugins.<name>` and is not the bridge's."""
    above = f"plugins.{name}."
    return {key[len(above) :]: v for key, v in values.items() if key.startswith(above) and not parameter_of(key)}


def for_plugin(values: Values, name: str, key: str) -> Value:
    return values.get(f"plugins.{name}.{key}") or values[f"plugin.{key}"]


# --- one key at a time ------------------------------------------------------------------------------------------------


def read(
    written: Sequence[Given], catalogue: Catalogue, problems: list[Problem], before: Values = MappingProxyType({})
) -> dict[str, Value]:
    """What was written, as values; the later wins. A plugin's nested tables are laid over what was there `before`."""
    values: dict[str, Value] = {}
    for given in written:
        if given.value == {} and given.keys[0] != "plugins" and _is_above(given.key):
            continue  # an empty table changes nothing
        if problem := _unknown(given, catalogue):
            if all(problem.key != other.key for other in problems):  # an unknown plugin is told once, not for each key
                problems.append(problem)
            continue
        try:
            value = _value(given, catalogue)
        except Wrong as wrong:
            problems.append(_problem(given, wrong.reason, wrong.nearest))
            continue
        if given.keys[0] == "plugins":
            if given.keys[1:] and (table := dotted(given.keys[:2])) not in before:
                values.setdefault(table, Value(MappingProxyType({}), given.source))
            if len(given.keys) < 3:
                continue
        old = values.get(given.key) or before.get(given.key)
        values[given.key] = Value(_laid_over(old.value if old else None, value), given.source)
    return values


def _problem(given: Given, reason: str, nearest: str | None = None) -> Problem:
    return Problem(key=given.key, value=given.value, reason=reason, where=str(given.source), nearest=nearest)


def _is_above(key: str) -> bool:
    return any(known.startswith(f"{key}.") for known in PARAMETERS)


def _unknown(given: Given, catalogue: Catalogue) -> Problem | None:
    """Why this key as a whole cannot be."""
    keys, names = given.keys, catalogue.names()
    if keys[0] == "plugins" and len(keys) < 3 and not isinstance(given.value, Mapping):
        nearest = close_key(given.key, [*PARAMETERS, *(f"plugins.{name}" for name in names)])
        return _problem(given, "must be a table", nearest)
    whole = attrs.evolve(given, value=None)
    if given.key == HOT_RELOAD or (keys[0] == "plugins" and keys[2:] == ("hot_reload",)):
        name = keys[1] if keys[0] == "plugins" else "NAME"
        return _problem(whole, f"is a command, not a setting: `chunkllm reload {name}`, which a later version brings")
    if keys[0] == "plugins":
        if len(keys) == 1 or keys[1] in names:
            return None
        whole = attrs.evolve(whole, keys=keys[:2])
        if why := catalogue.refused.get(keys[1]):
            return _problem(whole, f"installed, but {why}")
        found = close(keys[1], names)
        return _problem(whole, f"unknown plugin ({_known(names)})", f"plugins.{found}" if found else None)
    if parameter_of(keys):
        return None
    tables = dict.fromkeys(key.rpartition(".")[0] for key in PARAMETERS if "." in key)
    known = tables if isinstance(given.value, Mapping) else [*PARAMETERS, HOT_RELOAD]
    meant = next((dotted(("plugins", *keys[at:])) for at, name in enumerate(keys[:-1][:2]) if name in names), None)
    return _problem(whole, "unknown key", meant or close_key(given.key, known))


def _known(names: Sequence[str]) -> str:
    return f"known: {', '.join(names) or 'none'}"


def _value(given: Given, catalogue: Catalogue) -> Any:
    parameter = parameter_of(given.keys)
    if parameter is None:
        return freeze(given.value)
    value = parameter.read(given.value)
    if parameter.seam and value is not None:
        _must_fit(value, parameter.seam, catalogue)
    if parameter.key == "plugin.disable" and isinstance(value, frozenset):
        for name in sorted(value - set(catalogue.names())):
            nearest = close(name, [*catalogue.names(), "all", "everything", "none"])
            raise Wrong(f"unknown plugin {name!r} ({_known(catalogue.names())})", nearest)
    if parameter.key == "plugin.fp8" and value and "fp8" not in catalogue.names():
        raise Wrong(f"needs the plugin 'fp8', which is not installed ({_known(catalogue.names())})")
    return value


def _must_fit(name: str, seam: str, catalogue: Catalogue) -> None:
    if seam == "attention" and name in OWN_ATTENTION:
        return
    if name in catalogue.names():
        try:
            has = catalogue.seams(name)
        except BridgeError as error:
            raise Wrong(str(error)) from None
        if seam not in has:
            raise Wrong(f"{name} has no {seam} seam (it has: {', '.join(sorted(has)) or 'none'})")
        return
    fit = [other for other in catalogue.names() if _fits(other, seam, catalogue)]
    known = [*OWN_ATTENTION, *fit] if seam == "attention" else fit
    raise Wrong(f"unknown plugin ({_known(known)})", close(name, known))


def _fits(name: str, seam: str, catalogue: Catalogue) -> bool:
    try:
        return seam in catalogue.seams(name)
    except BridgeError:  # a broken plugin is no suggestion, and no reason to stop
        return False


def _laid_over(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return MappingProxyType({**old, **{name: _laid_over(old.get(name), inner) for name, inner in new.items()}})
    return new


def advice(profile: Profile, given: Values, catalogue: Catalogue) -> tuple[dict[str, Value], list[str]]:
    """What the profile sets, and what it would set if the plugin were there."""
    values, degraded = {}, []
    for key, wish in profile.sets.items():
        wished = Given(tuple(key.split(".")), wish, Source("profile", profile.name))
        try:
            values[key] = Value(_value(wished, catalogue), wished.source)
        except Wrong as wrong:
            parameter = PARAMETERS[key]
            lacking = f"{wished.source} asks for {key} = {parameter.shows(wish)}: {wrong.reason}"
            if key not in given:
                degraded.append(f"{lacking}; it stays {parameter.shows(parameter.default)}")
    return values, degraded


# --- all keys together ------------------------------------------------------------------------------------------------


def clashes(values: Values, hardware: Hardware, catalogue: Catalogue, drafter: str | None = None) -> Iterator[Problem]:
    """What is right alone and wrong together."""
    profile = choose(hardware, values["profile"].value)
    can_fp8 = hardware.has_fp8 or profile.emulates_fp8
    for key, value in values.items():
        parameter = parameter_of(key)
        if parameter and parameter.key in profile.forced:
            yield from _above_forced(key, value, parameter, profile)
        if parameter and parameter.key == "plugin.fp8" and value.value and not can_fp8:
            reason = f"there is no FP8 path on this device ({hardware.name})"
            yield Problem(key=key, value=True, reason=reason, where=str(value.source))
    used = [name for name in active(values, drafter) if not _is_off(values, name, catalogue)]
    yield from _over_committed(values, used)
    for name in used:
        yield from _config_mistakes(values, name, catalogue)


def _above_forced(key: str, value: Value, parameter: Parameter, profile: Profile) -> Iterator[Problem]:
    limit = parameter.read(profile.sets[parameter.key])
    if value.value is None or value.value > limit:
        reason, shown = f"profile {profile.name} allows at most {limit}", value.value or parameter.shows(None)
        yield Problem(key=key, value=shown, reason=reason, where=str(value.source), nearest=str(limit))


def _is_off(values: Values, name: str, catalogue: Catalogue) -> bool:
    """Whether the operator switched this plugin off; it is not imported then, so its own settings go unread."""
    off = values["plugin.disable"].value
    return bool(off == "everything" or (catalogue.needs_accelerator(name) if off == "all" else name in off))


def _over_committed(values: Values, names: Sequence[str]) -> Iterator[Problem]:
    wanted = {name: for_plugin(values, name, "memory_ratio") for name in names}
    shares = {"kv_cache": values["kv_cache.memory_ratio"], **wanted}
    numbers = {name: value.value for name, value in shares.items() if isinstance(value.value, float)}
    if (total := sum(numbers.values())) > 1 + 1e-9:
        reason = f"over-committed: {' + '.join(f'{n} {_two(x)}' for n, x in numbers.items())} = {_two(total)} > 1"
        first = next(iter(numbers))
        key = "kv_cache.memory_ratio" if first == "kv_cache" else f"plugins.{first}.memory_ratio"
        yield Problem(key=key, value=None, reason=reason, where=str(shares[first].source))


def _two(share: float) -> str:
    return f"{share:.2f}" if round(share, 2) == round(share, 9) else f"{round(share, 9):g}"


def _config_mistakes(values: Values, name: str, catalogue: Catalogue) -> Iterator[Problem]:
    table = f"plugins.{name}"
    naming = [value for value in (values["attention.plugin"], values["speculative.plugin"]) if value.value == name]
    given = own(values, name)
    plain = {field: value.value for field, value in given.items()}
    try:
        mistakes = configs.check(catalogue.config_class(name), plain, tuple(EACH))
    except BridgeError as error:  # the plugin cannot be imported
        mistakes = [configs.Mistake("", str(error))]
    for mistake in mistakes:
        key = f"{table}.{mistake.field}" if mistake.field else table
        place = values.get(key) or values.get(table) or (naming or [values["speculative.plugin"]])[0]
        value = None if mistake.unknown or mistake.field not in given else plain[mistake.field]
        nearest = f"{table}.{mistake.nearest}" if mistake.unknown and mistake.nearest else mistake.nearest
        yield Problem(key=key, value=value, reason=mistake.reason, where=str(place.source), nearest=nearest)


def fixed(given: Values, before: Values, slots: int, drafter: str | None) -> Iterator[Problem]:
    """What cannot change while the engine serves. `slots`, `drafter`: draft tokens and draft source of the launch."""
    present = {*active(before, drafter), *BUILT_IN, given.get("attention.plugin", before["attention.plugin"]).value}
    for key, value in given.items():
        parameter, of_plugin = parameter_of(key), key.startswith("plugins.")
        reason = None
        if of_plugin and key.split(".")[1] not in present:
            reason = "this plugin is not active; plugins are added at start"
        elif parameter and not (parameter.live_each if of_plugin else parameter.live):
            reason = f"cannot change while serving (what can: {', '.join(live_keys())})"
        elif key == "speculative.tokens" and value.value > slots:
            reason = f"the engine made room for {slots} at start"
        elif key == "speculative.plugin" and value.value not in (None, drafter):
            reason = f"the engine was launched with {drafter}; another draft source needs a restart"
            if drafter is None:
                reason = "the engine was not launched to speculate; start it with this setting"
        if reason:
            yield Problem(key=key, value=value.value, reason=reason, where=str(value.source))
