"""Which plugins are to be seated, what speaks against it, and what every process must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs

from chunkllm_bridge import __version__
from chunkllm_bridge.common import abi
from chunkllm_bridge.common.abi import EngineInfo, PluginSpec, Seam
from chunkllm_bridge.common.configs import build
from chunkllm_bridge.common.errors import BridgeError, IncompatibleError
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec

BUILT_IN = ("paged_kv", "batch_window")
"""Plugins that are always seated; without settings of theirs they plan nothing."""


def disabled(spec: Spec, registry: Registry, info: EngineInfo) -> dict[str, str]:
    """Plugins that the operator switched off, each with the reason."""
    off = spec["plugin.disable"]
    reasons = {}
    for name in wanted(spec):
        if off == "everything":
            reasons[name] = "plugin.disable = everything"
        elif off == "all":
            if registry.needs_accelerator(name):  # what cannot be read is not off: `check` says why it is refused
                none = ": it needs an accelerator and there is none" if info.device == "cpu" else ""
                reasons[name] = f"plugin.disable = all{none}"
        elif name in off:
            reasons[name] = "plugin.disable names it"
    return reasons


def is_off(spec: Spec, registry: Registry, name: str) -> bool:
    """Whether the operator switched this plugin off."""
    off = spec["plugin.disable"]
    return bool(off == "everything" or (registry.needs_accelerator(name) if off == "all" else name in off))


def wanted(spec: Spec) -> Sequence[str]:
    return [*BUILT_IN, *(name for name in spec.active if name not in BUILT_IN)]


def check(spec: Spec, registry: Registry, info: EngineInfo) -> list[str]:
    """Every reason why these plugins cannot run on this engine together. No effects, no plugin code runs."""
    reasons: list[str] = []
    seats: dict[Seam, list[PluginSpec]] = {}
    off = disabled(spec, registry, info)
    for name in wanted(spec):
        if name in off:
            continue
        try:
            facts = registry.facts(name)
        except BridgeError as error:
            reasons.append(str(error))
            continue
        reasons += [f"{name} {facts.version}: {reason}" for reason in facts.incompatibilities()]
        if missing := sorted(facts.requires - info.capabilities):
            offered = ", ".join(sorted(info.capabilities))
            lacks = ", ".join(missing)
            reasons.append(f"{name}: requires {lacks}; {info.engine} {info.version} offers {offered}")
        if facts.needs_accelerator and info.device == "cpu":
            reasons.append(f"{name}: needs an accelerator and there is none (plugin.disable = 'all' leaves it out)")
        for seam in facts.seams:
            seats.setdefault(seam, []).append(facts)
            if f"seam.{seam.value}" not in info.capabilities:
                reasons.append(f"{name}: {info.engine} {info.version} offers no seam {seam.value} yet")
    for seam, holders in seats.items():
        claim = next((facts for facts in holders if facts.exclusive), None)
        if len(holders) > 1 and (claim is not None or f"exclusive.{seam.value}" in info.capabilities):
            names = " and ".join(sorted(facts.name for facts in holders))
            why = f"{claim.name} wants it alone" if claim else f"{info.engine} offers it only once"
            reasons.append(f"seam {seam.value} is claimed by {names}, and {why}: disable all but one")
    return reasons


def fingerprint(spec: Spec, registry: Registry) -> str:
    """What every process of one engine must agree on: bridge, ABI, plugins with their versions, config."""
    parts = [__version__, str(abi.ABI), abi.SURFACE, spec.config_hash()]
    parts += [f"{name} {registry.version(name)} {registry.source(name)}" for name in wanted(spec)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def config_for(spec: Spec, registry: Registry, name: str) -> object:
    """A plugin's typed config: its own keys, and the parameters that its fields are bound to.

    A field is bound with `attrs.field(metadata={"parameter": "kv_cache.memory_ratio"})`; an own key beats it. Raises
    `IncompatibleError` where the Config, which is the author's code, refuses.
    """
    cls = registry.config_class(name)
    own = spec.plugin_config(name)
    bound = {}
    for field in attrs.fields(cls):
        parameter = field.metadata.get("parameter")
        if parameter is not None and (field.alias or field.name) not in own:
            group, _, key = parameter.partition(".")
            bound[field.alias or field.name] = spec.for_plugin(name, key) if group == "plugin" else spec[parameter]
    try:
        return build(cls, {**own, **bound})
    except Exception as error:
        raise IncompatibleError(name, [f"its Config refuses {own | bound}: {error}"]) from error
