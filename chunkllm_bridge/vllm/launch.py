"""The launch flags, and the spec on its way into vLLM's config. Runs in whatever process starts an engine."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib.metadata import entry_points
from typing import Any

import attrs

from chunkllm_bridge.common import launching, token
from chunkllm_bridge.common.errors import ConfigError, IncompatibleError, Problem
from chunkllm_bridge.common.launching import ACTIVE, NAME
from chunkllm_bridge.common.parameters import PARAMETERS
from chunkllm_bridge.common.passport import KEY, Passport
from chunkllm_bridge.common.pool import ratio_bytes
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.vllm.transport import HashedConfig, in_config, travels_in

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
        launching.add_flags(parser)
        return parser

    return add_cli_args


def wrap_from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        with launching.stopping_on_mistakes():
            take_flags(args)
        return original(cls, args)

    return from_cli_args


def take_flags(args: argparse.Namespace) -> None:
    """Resolve the flags into a passport, in place: spawned API servers get the same `args`. Raises `BridgeError`."""
    given = dict(getattr(args, "additional_config", None) or {})
    if travels_in(given) or (KEY in given and not getattr(args, "plugin", None)):
        return
    wish = launching.wished_by_flags(args)
    if wish is None:
        return
    if KEY in given:
        raise IncompatibleError("the plugin spec", [f"given twice: by --plugin and in --additional-config {KEY!r}"])
    stray, equals, _ = str(getattr(args, "model_tag", None)).partition("=")
    if wish.sets and equals and (stray in PARAMETERS or stray.startswith("plugins.")):
        reason = "taken for the model: each --plugin-set takes one; a list in a YAML file is to be a table"
        raise ConfigError([Problem(key=args.model_tag, value=None, reason=reason, where="command line")])
    passport = resolve(wish)
    speculation(args, passport)  # a mistake is told before anything starts
    args.additional_config = {**given, KEY: passport.to_wire()}
    open_control(os.environ)


def resolve(wish: launching.Wish) -> Passport:
    """The passport of a launch with this vLLM. Raises `ConfigError` or `IncompatibleError`."""
    from chunkllm_bridge.vllm import info

    found = info.probes()
    return launching.resolve(wish, found, info.launch_info(found))


# ---- the config ----------------------------------------------------------------------------------------------------


def wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.additional_config
        if not isinstance(given, Mapping) or KEY not in given:
            return original(self, *args, **kwargs)
        if not travels_in(given):  # from Python: additional_config={"chunkllm": {...}}
            passport = resolve(launching.wished(given[KEY], "additional_config"))
            self.additional_config = {**given, KEY: passport.to_wire()}
            if not is_offline(*args, **kwargs):
                open_control(os.environ)
        drafts = speculation(self, Passport.from_wire(self.additional_config[KEY]))
        if drafts is not None:
            self.speculative_config = drafts
        config = original(self, *args, **kwargs)
        activate(config)
        return config

    return create_engine_config


def is_offline(usage_context: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether the `LLM` class starts this engine: no HTTP server, so no routes to open."""
    return getattr(usage_context, "name", "") == "LLM_CLASS"


SPECULATIVE = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Where an operator asks vLLM itself for speculation, in `EngineArgs` and on the command line."""


def speculation(arguments: Any, passport: Passport) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for the drafts of `speculative.plugin`; None: nobody drafts.

    Raises `IncompatibleError` for what cannot stand beside it in `EngineArgs` or on the command line.
    """
    from chunkllm_bridge.vllm.drafts import METHOD, PROPOSER

    spec = passport.spec
    slots = launching.draft_slots(spec, Registry.installed())
    if slots is None:
        return None
    reasons, ours = [], f"speculative.plugin = {spec['speculative.plugin']}"
    given = [name for name in SPECULATIVE if getattr(arguments, name, None) is not None]
    if given and (arguments.speculative_config or {}).get("model") != PROPOSER:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        reasons.append(f"{ours} and {flags}: both say who drafts, leave one of them out")
    if arguments.pipeline_parallel_size > 1:
        stages = f"--pipeline-parallel-size {arguments.pipeline_parallel_size}"
        reasons.append(f"{ours} and {stages}: the heads of the model and its embedding are in different workers")
    if reasons:
        raise IncompatibleError("the plugin spec", reasons)
    return {"method": METHOD, "model": PROPOSER, "num_speculative_tokens": slots[0]}


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
