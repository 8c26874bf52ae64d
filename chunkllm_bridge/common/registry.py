"""Names to plugins: what is installed under the entry-point group, and what the operator allows."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from chunkllm_bridge.common.abi import Plugin, PluginSpec
from chunkllm_bridge.common.errors import BridgeError, IncompatibleError
from chunkllm_bridge.common.facts import read_facts

GROUP = "chunkllm.plugins"
ALLOW = "CHUNKLLM_PLUGINS"
"""Environment variable: a comma-separated allow-list of plugin names. The bridge's own plugins are always allowed."""

BUILT_IN = "chunkllm_bridge."


class Registry:
    """The plugins that can be named. Facts are read without importing; a class is imported when it is loaded."""

    def __init__(self, found: Iterable[EntryPoint], allow: frozenset[str] | None = None) -> None:
        self._points: dict[str, EntryPoint] = {}
        self.refused: dict[str, str] = {}  # installed, but cannot be named: name -> why
        for point in found:
            if allow is not None and point.name not in allow and not point.value.startswith(BUILT_IN):
                self.refused[point.name] = f"not in {ALLOW}"
                continue
            other = self._points.setdefault(point.name, point)
            if other.value != point.value:
                twice = f"registered by two distributions, {describe(other)} and {describe(point)}; uninstall one"
                self.refused[point.name] = twice
        for name in self.refused:
            self._points.pop(name, None)
        self._facts: dict[str, PluginSpec] = {}
        self._classes: dict[str, type[Plugin]] = {}

    @classmethod
    def installed(cls, environ: Mapping[str, str] | None = None) -> Registry:
        """What `importlib.metadata` finds, filtered by the allow-list."""
        allow = (os.environ if environ is None else environ).get(ALLOW)
        names = None if allow is None else frozenset(name.strip() for name in allow.split(",") if name.strip())
        return cls(entry_points(group=GROUP), names)

    def names(self) -> Sequence[str]:
        return sorted(self._points)

    def facts(self, name: str) -> PluginSpec:
        """What the plugin says of itself; nothing of it runs. Raises `IncompatibleError`."""
        if name not in self._facts:
            self._facts[name] = read_facts(name, self._point(name).value)
        return self._facts[name]

    def seams(self, name: str) -> frozenset[str]:
        return frozenset(seam.value for seam in self.facts(name).seams)

    def needs_accelerator(self, name: str) -> bool:
        """Whether it says so; one that cannot be read is taken to need none."""
        try:
            return self.facts(name).needs_accelerator
        except IncompatibleError:
            return False

    def config_class(self, name: str) -> type:
        return self.load(name).Config

    def load(self, name: str) -> type[Plugin]:
        """Import the plugin's class. Raises `IncompatibleError` with the import's own words."""
        if name in self._classes:
            return self._classes[name]
        point = self._point(name)
        try:
            loaded = point.load()
        except (Exception, SystemExit) as error:  # a module may raise anything at import; the operator must hear what
            raise IncompatibleError(name, [f"importing {describe(point)}: {type(error).__name__}: {error}"]) from error
        if not (isinstance(loaded, type) and issubclass(loaded, Plugin)):
            raise IncompatibleError(name, [f"{describe(point)} is not a subclass of chunkllm_bridge.Plugin"])
        self._classes[name] = loaded
        return loaded

    def version(self, name: str) -> str:
        """Its version; "unreadable" where it cannot say: one that is switched off need not be readable."""
        try:
            return self.facts(name).version
        except IncompatibleError:
            return "unreadable"

    def source(self, name: str) -> str:
        return describe(self._point(name))

    def describe(self) -> list[dict[str, Any]]:
        """Every plugin as a row for people and programs; one that cannot be read says why."""
        return [self._row(name) for name in self.names()]

    def _row(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name, "source": self.source(name), "state": "installed"}
        try:
            facts = self.facts(name)
        except BridgeError as error:
            return {**row, "state": "unreadable", "reasons": [str(error)]}
        return {
            **row,
            "version": facts.version,
            "abi": list(facts.abi),
            "seams": sorted(seam.value for seam in facts.seams),
            "summary": facts.summary,
            "reasons": facts.incompatibilities(),
        }

    def _point(self, name: str) -> EntryPoint:
        if name in self._points:
            return self._points[name]
        if name in self.refused:
            raise BridgeError(f"plugin {name!r} is installed but {self.refused[name]}")
        near = difflib.get_close_matches(name, self._points, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BridgeError(f"unknown plugin {name!r} (known: {', '.join(self.names())}){hint}")


def describe(point: EntryPoint) -> str:
    """Where an entry point comes from, for people: "pkg.module:Class of dist 1.2"."""
    dist = getattr(point, "dist", None)
    return f"{point.value} of {dist.name} {dist.version}" if dist is not None else point.value
