"""What somebody who launches an engine wishes of the bridge, and the passport that comes of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from chunkllm_bridge.common.abi import EngineInfo
from chunkllm_bridge.common.errors import BridgeError, ConfigError, IncompatibleError, Problem
from chunkllm_bridge.common.guard import told
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.passport import Passport
from chunkllm_bridge.common.profiles import this_machine
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.seating import check, config_for, is_off
from chunkllm_bridge.common.snapshots import Snapshots
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.common.values import to_text

log = get_logger("launching")

NAME = "chunkllm"
ACTIVE = "CHUNKLLM_ACTIVE"
"""Environment variable that tells the engine's child processes to attach; the spec itself travels in the passport."""


def _all(sets: Iterable[str]) -> tuple[str, ...]:
    return tuple(sets)


@attrs.frozen
class Wish:
    """What a spec is resolved from."""

    file: Path | None = None
    sets: Sequence[str] = attrs.field(default=(), converter=_all)  # KEY=VALUE, beating the file
    strict: bool = True  # refuse engine symbols that are not the ones that were read


# ---- on a command line ---------------------------------------------------------------------------------------------


def add_flags(parser: Any) -> None:
    """Our group of launch flags, on an engine's own parser."""
    group = parser.add_argument_group("ChunkLLM Bridge", "Plugins that run on vLLM and SGLang alike.")
    group.add_argument("--plugin", action="append", metavar="NAME", help="chunkllm attaches the bridge.")
    group.add_argument("--plugin-config", metavar="FILE", help="The plugin spec, a TOML file.")
    group.add_argument(
        "--plugin-set",
        action="append",
        metavar="KEY=VALUE",
        help="One parameter of the spec, beating the file; can be given several times.",
    )
    group.add_argument(
        "--plugin-strict",
        choices=("on", "off"),
        default="on",
        help="on: refuse to start when an engine symbol is not the one that the bridge was written against.",
    )
    # what an engine makes of `off` in its own YAML file, where it means false
    group.add_argument(
        "--no-plugin-strict", dest="plugin_strict", action="store_const", const="off", help=argparse.SUPPRESS
    )


def wished_by_flags(args: argparse.Namespace) -> Wish | None:
    """What our flags ask for; None without `--plugin chunkllm`. Raises `BridgeError` for flags that cannot be meant."""
    names = getattr(args, "plugin", None) or []
    file, sets = getattr(args, "plugin_config", None), getattr(args, "plugin_set", None) or []
    if not names:
        if file is not None or sets:
            flags = " and ".join(flag for flag, value in (("--plugin-config", file), ("--plugin-set", sets)) if value)
            raise IncompatibleError("the plugin spec", [f"{flags} without --plugin {NAME}: add it, or leave them out"])
        return None
    if unknown := sorted(set(names) - {NAME}):
        hint = f"--plugin takes {NAME}; a plugin of its own is seated by [plugins.{unknown[0]}] in the spec"
        problem = Problem(key="--plugin", value=unknown[0], reason=hint, where="command line", nearest=NAME)
        raise ConfigError([problem])
    strict = getattr(args, "plugin_strict", "on") == "on"
    return Wish(None if file is None else Path(file), plain_sets(sets), strict)


@contextlib.contextmanager
def stopping_on_mistakes() -> Iterator[None]:
    """On a command line a mistake is a message and an exit code, not a traceback."""
    try:
        yield
    except BridgeError as error:
        print(f"chunkllm: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def plain_sets(sets: Sequence[str]) -> Iterator[str]:
    """A table from an engine's own YAML file comes as one JSON text, where KEY=VALUE is expected."""
    for text in sets:
        try:
            table = json.loads(text)
        except ValueError:
            table = None
        if isinstance(table, dict):
            yield from wish_sets(table)
        else:
            yield text


# ---- in Python -----------------------------------------------------------------------------------------------------


def wish_of_arguments(
    plugin: str | None, plugin_config: str | Path | None, plugin_set: Sequence[str] | Mapping[str, Any]
) -> Wish | None:
    """The launch flags as keyword arguments; None without `plugin=`. Raises `IncompatibleError`."""
    if plugin is None:
        if plugin_config is not None or plugin_set:
            raise IncompatibleError("the plugin spec", [f"plugin_config and plugin_set need plugin={NAME!r}"])
        return None
    if plugin != NAME:
        raise IncompatibleError("the plugin spec", [f"plugin={plugin!r}: the bridge is called {NAME!r}"])
    sets = wish_sets(plugin_set) if isinstance(plugin_set, Mapping) else plugin_set
    return Wish(None if plugin_config is None else Path(plugin_config), sets)


def wished(wish: object, where: str = "wish") -> Wish:
    """What somebody put under our key, a table of parameters and "plugin_config". Raises `ConfigError`.

    `where` is what the engine calls the place.
    """
    file = wish.get("plugin_config") if isinstance(wish, Mapping) else None
    if not isinstance(wish, Mapping) or not isinstance(file, str | Path | None):
        reason = 'must be a table of parameters, and "plugin_config" in it a path'
        raise ConfigError([Problem(key=NAME, value=wish, reason=reason, where=where)])
    sets = {key: value for key, value in wish.items() if key != "plugin_config"}
    return Wish(None if file is None else Path(file), wish_sets(sets))


def wish_sets(wish: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A nested wish such as {"kv_cache": {"memory_ratio": 0.1}} as KEY=VALUE texts."""
    for key, value in wish.items():
        if isinstance(value, Mapping) and value:
            yield from wish_sets(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={to_text(value)}"  # an empty table seats a plugin


# ---- the passport --------------------------------------------------------------------------------------------------


class Probe(Protocol):
    """What a ledger of patches found at one engine symbol."""

    @property
    def target(self) -> str: ...
    @property
    def status(self) -> str: ...  # "present", "changed", "missing"
    @property
    def detail(self) -> str: ...


def resolve(wish: Wish, probes: Sequence[Probe], launch_info: EngineInfo) -> Passport:
    """Check everything that can be checked before the model is loaded. Raises `ConfigError` or `IncompatibleError`."""
    registry = Registry.installed()
    spec = Spec.resolve(file=wish.file, sets=wish.sets, hardware=this_machine(), catalogue=registry)
    if reasons := [*seam_reasons(probes, strict=wish.strict), *check(spec, registry, launch_info)]:
        raise IncompatibleError("the plugin spec", reasons)
    if spec.origin is not None:
        Snapshots.of(spec)
    for warning in spec.warnings:
        log.warning("spec.risk", warning=warning)
    return Passport.issue(spec, registry, strict=wish.strict)


def draft_slots(spec: Spec, registry: Registry) -> tuple[int, int] | None:
    """(draft tokens on one path, draft tokens per request) for which the engine is to make room; None: it does not
    speculate. Raises `IncompatibleError` where the plugin cannot say how many it needs."""
    name, tokens = spec["speculative.plugin"], int(spec["speculative.tokens"])
    if name is None or is_off(spec, registry, name):
        return None
    cls, config = registry.load(name), config_for(spec, registry, name)
    try:
        nodes = int(cls(config).draft_nodes(tokens))
    except Exception as error:  # plugin code
        raise IncompatibleError(name, [f"asking for its draft nodes raised {told(error)}"]) from error
    return tokens, max(tokens, nodes)


def seam_reasons(probes: Sequence[Probe], *, strict: bool) -> list[str]:
    """Engine symbols that stop an attachment: missing ones always, changed ones when strict."""
    reasons = [f"{p.target} is missing: {p.detail}" for p in probes if p.status == "missing"]
    if strict:
        changed = [probe for probe in probes if probe.status == "changed"]
        reasons += [f"{p.target} changed: {p.detail} (--plugin-strict off starts all the same)" for p in changed]
    return reasons
