"""The launch flags, and the spec on its way into vLLM's config. Runs in whatever process starts an engine."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs

from chunkllm_bridge.common import token
from chunkllm_bridge.common.errors import BridgeError, ConfigError, IncompatibleError, Problem
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.parameters import PARAMETERS
from chunkllm_bridge.common.passport import KEY, Passport
from chunkllm_bridge.common.pool import ratio_bytes
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.seating import check
from chunkllm_bridge.common.snapshots import Snapshots
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.common.values import to_text
from chunkllm_bridge.patches import Probe
from chunkllm_bridge.vllm.transport import HashedConfig, in_config, travels_in

log = get_logger("vllm.launch")

NAME = "chunkllm"
ACTIVE = "CHUNKLLM_ACTIVE"
"""Environment variable that tells the engine's child processes to attach; the spec itself travels in the config."""

GROUPS = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")

_undo: contextlib.ExitStack | None = None


def register() -> None:
    """vLLM's general plugin. Idempotent; never raises, for a raise here would end every `vllm` command."""
    global _undo
    if _undo is not None:
        return
    try:
        from chunkllm_bridge.patches import vllm as patches

        with contextlib.ExitStack() as undo:
            undo.callback(patches.ADD_CLI_ARGS.apply(wrap_add_cli_args))
            undo.callback(patches.FROM_CLI_ARGS.apply(wrap_from_cli_args))
            undo.callback(patches.CREATE_ENGINE_CONFIG.apply(wrap_create_engine_config))
            undo.callback(share_handlers())
            if os.environ.get(ACTIVE) == "1":
                undo.callback(patch_core())
            _undo = undo.pop_all()
    except Exception as error:  # an engine that moved on must start without us; the operator hears why
        print(f"chunkllm: not loaded: {type(error).__name__}: {error} (see `chunkllm doctor`)", file=sys.stderr)


def unregister() -> None:
    """Put vLLM's own functions back. Idempotent."""
    global _undo
    if _undo is not None:
        _undo.close()
        _undo = None


def patch_core() -> Callable[[], None]:
    from chunkllm_bridge.patches import vllm as patches
    from chunkllm_bridge.vllm.attach import wrap_initialize_kv_caches

    return patches.INITIALIZE_KV_CACHES.apply(wrap_initialize_kv_caches)


def share_handlers() -> Callable[[], None]:
    """Send our log records where vLLM sends its own, unless the program gave `chunkllm` handlers itself."""
    ours = logging.getLogger(NAME)
    if ours.handlers:
        return lambda: None
    before, ours.parent = ours.parent, logging.getLogger("vllm")
    return lambda: setattr(ours, "parent", before)


# ---- flags ---------------------------------------------------------------------------------------------------------


def wrap_add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
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
        # what vLLM makes of `off` in a YAML file, where it means false
        group.add_argument(
            "--no-plugin-strict", dest="plugin_strict", action="store_const", const="off", help=argparse.SUPPRESS
        )
        return parser

    return add_cli_args


def wrap_from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        with stopping_on_mistakes():
            take_flags(args)
        return original(cls, args)

    return from_cli_args


@contextlib.contextmanager
def stopping_on_mistakes() -> Iterator[None]:
    """On a command line a mistake is a message and an exit code, not a traceback."""
    try:
        yield
    except BridgeError as error:
        print(f"chunkllm: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def take_flags(args: argparse.Namespace) -> None:
    """Resolve the flags into a passport, in place: spawned API servers get the same `args`. Raises `BridgeError`."""
    given = dict(getattr(args, "additional_config", None) or {})
    if travels_in(given):
        return
    names = getattr(args, "plugin", None) or []
    file, sets = getattr(args, "plugin_config", None), getattr(args, "plugin_set", None) or []
    if not names:
        if (file is not None or sets) and KEY not in given:
            flags = " and ".join(flag for flag, value in (("--plugin-config", file), ("--plugin-set", sets)) if value)
            raise IncompatibleError("the plugin spec", [f"{flags} without --plugin {NAME}: add it, or leave them out"])
        return
    if unknown := sorted(set(names) - {NAME}):
        hint = f"--plugin takes {NAME}; a plugin of its own is seated by [plugins.{unknown[0]}] in the spec"
        problem = Problem(key="--plugin", value=unknown[0], reason=hint, where="command line", nearest=NAME)
        raise ConfigError([problem])
    if KEY in given:
        raise IncompatibleError("the plugin spec", [f"given twice: by --plugin and in --additional-config {KEY!r}"])
    stray, equals, _ = str(getattr(args, "model_tag", None)).partition("=")
    if sets and equals and (stray in PARAMETERS or stray.startswith("plugins.")):
        reason = "taken for the model: each --plugin-set takes one; a list in a YAML file is to be a table"
        raise ConfigError([Problem(key=args.model_tag, value=None, reason=reason, where="command line")])
    strict = getattr(args, "plugin_strict", "on") == "on"
    passport = resolve(None if file is None else Path(file), list(plain_sets(sets)), strict=strict)
    args.additional_config = {**given, KEY: passport.to_wire()}
    open_control(os.environ)


# ---- the spec ------------------------------------------------------------------------------------------------------


def resolve(file: Path | None, sets: Sequence[str], *, strict: bool = True) -> Any:
    """Check everything that can be checked before the model is loaded. Raises `ConfigError` or `IncompatibleError`."""
    from chunkllm_bridge.common.profiles import this_machine
    from chunkllm_bridge.vllm import info

    registry = Registry.installed()
    spec = Spec.resolve(file=file, sets=sets, hardware=this_machine(), catalogue=registry)
    found = info.probes()
    reasons = [*seam_reasons(found, strict=strict), *check(spec, registry, info.launch_info(found))]
    if reasons:
        raise IncompatibleError("the plugin spec", reasons)
    if spec.origin is not None:
        Snapshots.of(spec)
    for warning in spec.warnings:
        log.warning("spec.risk", warning=warning)
    return Passport.issue(spec, registry, strict=strict)


def seam_reasons(probes: Sequence[Probe], *, strict: bool) -> list[str]:
    """Engine symbols that stop an attachment: missing ones always, changed ones when strict."""
    reasons = [f"{p.target} is missing: {p.detail}" for p in probes if p.status == "missing"]
    if strict:
        changed = [probe for probe in probes if probe.status == "changed"]
        reasons += [f"{p.target} changed: {p.detail} (--plugin-strict off starts all the same)" for p in changed]
    return reasons


def plain_sets(sets: Sequence[str]) -> Iterator[str]:
    """A table from vLLM's own YAML file comes as one JSON text, where KEY=VALUE is expected."""
    for text in sets:
        try:
            table = json.loads(text)
        except ValueError:
            table = None
        if isinstance(table, dict):
            yield from wish_sets(table)
        else:
            yield text


def wish_sets(wish: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A nested wish such as {"kv_cache": {"memory_ratio": 0.1}} as KEY=VALUE texts."""
    for key, value in wish.items():
        if isinstance(value, Mapping) and value:
            yield from wish_sets(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={to_text(value)}"  # an empty table seats a plugin


def wished(wish: object) -> tuple[Path | None, list[str]]:
    """The spec file and the KEY=VALUE texts of what somebody put under our key. Raises `ConfigError`."""
    file = wish.get("plugin_config") if isinstance(wish, Mapping) else None
    if not isinstance(wish, Mapping) or not isinstance(file, str | Path | None):
        reason = 'must be a table of parameters, and "plugin_config" in it a path'
        raise ConfigError([Problem(key=NAME, value=wish, reason=reason, where="additional_config")])
    sets = {key: value for key, value in wish.items() if key != "plugin_config"}
    return None if file is None else Path(file), list(wish_sets(sets))


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.additional_config
        if not isinstance(given, Mapping) or KEY not in given:
            return original(self, *args, **kwargs)
        if not travels_in(given):  # from Python: additional_config={"chunkllm": {...}}
            passport = resolve(*wished(given[KEY]))
            self.additional_config = {**given, KEY: passport.to_wire()}
            if not is_offline(*args, **kwargs):
                open_control(os.environ)
        config = original(self, *args, **kwargs)
        activate(config)
        return config

    return create_engine_config


def is_offline(usage_context: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether the `LLM` class starts this engine: no HTTP server, so no routes to open."""
    return getattr(usage_context, "name", "") == "LLM_CLASS"


def activate(config: Any) -> None:
    """Make a resolved `VllmConfig` one that attaches the bridge wherever it arrives."""
    from chunkllm_bridge.vllm import info
    from chunkllm_bridge.vllm.attach import GUARD

    passport = in_config(config)
    assert passport is not None
    scheduler, cache = config.scheduler_config, config.cache_config
    if scheduler.scheduler_cls != GUARD:
        chosen = scheduler.scheduler_cls
        name = f"{chosen.__module__}.{chosen.__qualname__}" if isinstance(chosen, type) else chosen
        passport = attrs.evolve(passport, engine={"scheduler_cls": name})  # put back once ours need not stand guard
        scheduler.scheduler_cls = GUARD
    config.additional_config = HashedConfig({**config.additional_config, KEY: passport.to_wire()})
    if config.device_config.device_type == "cpu":
        # vLLM's CPU worker takes most of the machine unless it is told; on a GPU the measured size is capped instead
        allowed = ratio_bytes(passport.spec, info.engine_info(config, role="launch"))
        if allowed is not None:
            cache.kv_cache_memory_bytes = min(allowed, cache.kv_cache_memory_bytes or allowed)
    ensure_core_patched()


def ensure_core_patched() -> None:
    """Children attach by the environment; an engine in this very process attaches by the patch."""
    os.environ[ACTIVE] = "1"
    from chunkllm_bridge.patches import vllm as patches

    if patches.INITIALIZE_KV_CACHES.applied():
        return
    undo = patch_core()
    if _undo is not None:
        _undo.callback(undo)


def open_control(environ: MutableMapping[str, str]) -> None:
    """Allow our HTTP routes. vLLM loads endpoint plugins only if VLLM_PLUGINS names them; then it is an allow-list for
    all its plugins, so every other installed one is named too. A list that the user made is left alone."""
    token.ensure(environ)
    if "VLLM_PLUGINS" in environ:
        return
    names = [NAME, *(point.name for group in GROUPS for point in entry_points(group=group))]
    environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys(names))
