"""The operator's parameters, resolved: every value checked, with its source, and frozen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from chunkllm_bridge.common import checks
from chunkllm_bridge.common.checks import Catalogue, Value, Values
from chunkllm_bridge.common.errors import ConfigError, Problem
from chunkllm_bridge.common.parameters import HOT_RELOAD, PARAMETERS, STATE_FOLDER, live_keys
from chunkllm_bridge.common.profiles import Hardware, choose
from chunkllm_bridge.common.values import freeze, thaw, to_text
from chunkllm_bridge.common.written import Source, read_file, read_mapping, read_sets

__all__ = ["Catalogue", "Source", "Spec", "Value", "live_keys"]

SCHEMA = 2  # of the wire format
MOST_CHANGES = 100  # keys of one change while serving


def _frozen(values: Values) -> Values:
    return MappingProxyType(dict(values))


@attrs.frozen(kw_only=True)
class Spec:
    """Made by `resolve` or `from_wire`, changed only by `evolve` into another."""

    hardware: Hardware
    origin: Path | None
    slots: int  # draft tokens that the engine makes room for at start; `speculative.tokens` stays within
    drafter: str | None  # the draft source at start; `speculative.plugin` is this one, or none while it is turned off
    degraded: tuple[str, ...]  # what the profile asks for and this installation lacks
    values: Values = attrs.field(converter=_frozen, hash=False)

    @classmethod
    def resolve(
        cls,
        *,
        file: Path | None,
        sets: Sequence[str] = (),
        hardware: Hardware,
        catalogue: Catalogue,
        text: str | None = None,
    ) -> Spec:
        """Launch line over file over profile over default. A ConfigError lists every mistake."""
        problems: list[Problem] = []
        written = [*read_file(file, text, problems), *read_sets(sets, problems, Source("set"))]
        given = checks.read(written, catalogue, problems)
        profile = choose(hardware, given["profile"].value if "profile" in given else None)
        advice, degraded = checks.advice(profile, given, catalogue)
        values = {key: Value(parameter.default, Source("default")) for key, parameter in PARAMETERS.items()}
        values |= {"profile": Value(profile.name, Source("default")), **advice, **given}
        values["rollback.config"] = _beside(file, values["rollback.config"])
        problems += checks.clashes(values, hardware, catalogue)
        if problems:
            raise ConfigError(problems)
        return cls(
            hardware=hardware,
            origin=file and file.absolute(),
            slots=values["speculative.tokens"].value,
            drafter=values["speculative.plugin"].value,
            degraded=tuple(degraded),
            values=values,
        )

    def evolve(self, sets: Mapping[str, Any] | Sequence[str], *, catalogue: Catalogue) -> Spec:
        """A change while serving, under the same checks as at start."""
        problems: list[Problem] = []
        live = Source("live")
        written = read_mapping(sets, live) if isinstance(sets, Mapping) else read_sets(sets, problems, live)
        if len(written) > MOST_CHANGES:  # the engine waits meanwhile
            reason = f"at most {MOST_CHANGES} keys can change at once"
            raise ConfigError([Problem(key=f"{len(written)} keys", value=None, reason=reason, where=str(live))])
        given = checks.read(written, catalogue, problems, self.values)
        values = {**self.values, **given}
        problems += checks.fixed(given, self.values, self.slots, self.drafter)
        problems += checks.clashes(values, self.hardware, catalogue, self.drafter)
        if problems:
            raise ConfigError(problems)
        return attrs.evolve(self, values=values)

    def __getitem__(self, key: str) -> Any:
        """The value in effect; a plugin's own list or table as a copy."""
        value = self.values[key].value
        return thaw(value) if isinstance(value, tuple | MappingProxyType) else value

    def __contains__(self, key: object) -> bool:
        return key in self.values

    def value(self, key: str) -> Value:
        return self.values[key]

    def for_plugin(self, name: str, key: str) -> Any:
        """`plugins.<name>.<key>`, or else what `plugin.<key>` says for all."""
        return checks.for_plugin(self.values, name, key).value

    def plugin_config(self, name: str) -> dict[str, Any]:
        """The plugin's own keys, checked; a copy. `configs.build` makes its Config of them."""
        return {key: thaw(value.value) for key, value in checks.own(self.values, name).items()}

    @property
    def active(self) -> tuple[str, ...]:
        """The plugins that the spec asks for, before `plugin.disable`; the built-in ones only where it names them."""
        return checks.active(self.values, self.drafter)

    @property
    def profile(self) -> str:
        return str(self["profile"])

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but risky, and what the profile asks for in vain."""
        ruled = ((key, checks.parameter_of(key)) for key in self.values)
        risks = (parameter.warning(key, self[key]) for key, parameter in ruled if parameter)
        return (*self.degraded, *filter(None, risks))

    def config_hash(self) -> str:
        """The same for the same effective values, wherever they come from and wherever the files lie."""
        effective = {key: thaw(value.value) for key, value in self.values.items()}
        del effective["rollback.config"], effective["profile"]
        return hashlib.sha256(json.dumps(effective, sort_keys=True).encode()).hexdigest()[:12]

    def rows(self) -> list[tuple[str, str, str]]:
        """(key, value as an operator would write it, source), in the order of the manual."""
        rows = [(key, PARAMETERS[key].shows(self[key]), str(self.value(key).source)) for key in PARAMETERS]
        at = 1 + list(PARAMETERS).index("rollback.config")
        rows.insert(at, (HOT_RELOAD, "chunkllm reload NAME", "a command"))
        for name in self.active:
            table = f"plugins.{name}"
            keys = [key for key in self.values if key.startswith(f"{table}.")]
            for key in keys or [key for key in self.values if key == table]:
                parameter = checks.parameter_of(key)
                shows = parameter.shows if parameter else to_text
                rows.append((key, shows(self[key]), str(self.value(key).source)))
        return rows

    def to_wire(self) -> dict[str, Any]:
        """JSON for the engine's other processes and for snapshots."""
        return {
            "schema": SCHEMA,
            "hardware": {**attrs.asdict(self.hardware), "compute_capability": thaw(self.hardware.compute_capability)},
            "origin": self.origin and str(self.origin),
            "slots": self.slots,
            "drafter": self.drafter,
            "degraded": list(self.degraded),
            "values": {key: [thaw(v.value), v.source.kind, v.source.detail] for key, v in self.values.items()},
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Spec:
        """Raises ValueError for what another version wrote."""
        if data["schema"] != SCHEMA or not PARAMETERS.keys() <= data["values"].keys():
            raise ValueError(f"schema {data['schema']} was written by another version; this one reads {SCHEMA}")
        capability = data["hardware"]["compute_capability"]
        hardware = {**data["hardware"], "compute_capability": capability and tuple(capability)}
        return cls(
            hardware=Hardware(**hardware),
            origin=data["origin"] and Path(data["origin"]),
            slots=data["slots"],
            drafter=data["drafter"],
            degraded=tuple(data["degraded"]),
            values={key: Value(_restored(key, v), Source(*source)) for key, (v, *source) in data["values"].items()},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec.from_wire, (self.to_wire(),)


def _beside(file: Path | None, state: Value) -> Value:
    """Where snapshots lie: a relative path starts at the spec file, or here if there is none."""
    folder = Path.cwd() if file is None else file.absolute().parent
    if state.value is None:
        return Value(file and folder / STATE_FOLDER, state.source)
    return Value(folder / state.value, state.source)


def _restored(key: str, value: Any) -> Any:
    parameter = checks.parameter_of(key)
    return parameter.restores(value) if parameter else freeze(value)
