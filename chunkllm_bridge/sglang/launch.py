"""The launch flags, the spec on its way into SGLang's processes, and the check that it arrived in all of them.

SGLang logs what a plugin raises and goes on without it. So a launch with `--plugin chunkllm` looks for the bridge in
every scheduler before anybody is served, and ends where it is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from chunkllm_bridge.common import launching
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.launching import ACTIVE, Wish, add_flags, stopping_on_mistakes, wished_by_flags
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.passport import Passport
from chunkllm_bridge.common.profiles import this_machine
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec

log = get_logger("sglang.launch")

CONFIG = "CHUNKLLM_CONFIG"
"""Environment variable: a spec file for every engine that a Python program starts, see `arm`."""

OFF = "_chunkllm_off"
"""Our mark on a `ServerArgs` from a command line without the flag: there, flags alone count."""

ENGINE = "sglang.srt.entrypoints.engine"
LAUNCHING = ("_launch_subprocesses", ENGINE)

_undo: contextlib.ExitStack | None = None
_armed = False


def register() -> None:
    """SGLang's general plugin, called in every process of an engine. Idempotent.

    In a process of a launch with the flag a failure ends that process; anywhere else the operator hears why, and SGLang
    starts without us.
    """
    global _undo
    if _undo is not None:
        return
    child = os.environ.get(ACTIVE) == "1"
    try:
        with contextlib.ExitStack() as undo:
            if child:
                hook_child(undo)
            else:
                hook_launcher(undo)
            _undo = undo.pop_all()
    except Exception as error:
        if child:
            from chunkllm_bridge.sglang.refusal import refuse

            refuse(error)
        print(f"chunkllm: not loaded: {type(error).__name__}: {error} (see `chunkllm doctor`)", file=sys.stderr)
    if _armed and not child and launch_has_begun():
        why = f"{CONFIG} is set, but this engine was started before SGLang loaded us"
        raise SystemExit(f"chunkllm: {why}: import {ENGINE} before chunkllm_bridge.sglang")


def launch_has_begun() -> bool:
    """Whether SGLang calls us from a launch that we cannot wrap any more, such as `http_server.launch_server`."""
    frame = sys._getframe().f_back
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != LAUNCHING:
        frame = frame.f_back
    return frame is not None


def unregister() -> None:
    """Put SGLang's own functions back. Idempotent."""
    global _undo
    if _undo is not None:
        _undo.close()
        _undo = None


def arm() -> None:
    """Attach the bridge to engines that a program makes with SGLang's own classes, by the file in CHUNKLLM_CONFIG.

    Only remembers it: SGLang calls `register` itself before it starts an engine. Raises `IncompatibleError` where it
    would not.
    """
    global _armed
    from chunkllm_bridge.sglang import obstacles

    if reasons := obstacles.hidden_by(os.environ):
        raise IncompatibleError("the bridge", reasons)
    _armed = True
    if hasattr(sys.modules.get(ENGINE), "Engine") and os.environ.get(ACTIVE) != "1":
        register()
        ensure_launch_patched()


def hook_launcher(undo: contextlib.ExitStack) -> None:
    from chunkllm_bridge.patches import sglang as patches

    undo.callback(patches.ADD_CLI_ARGS.apply(wrap_add_cli_args))
    undo.callback(patches.FROM_CLI_ARGS.apply(wrap_from_cli_args))
    if hasattr(sys.modules.get(ENGINE), "Engine"):  # a command line imports it later, and costs seconds
        hook_engine(undo)


def hook_engine(undo: contextlib.ExitStack) -> None:
    from sglang.srt.entrypoints.engine import Engine

    from chunkllm_bridge.patches import sglang as patches

    undo.callback(patches.LAUNCH.apply(wrap_launch))
    if _armed and "chunkllm" not in vars(Engine):
        from chunkllm_bridge.sglang.offline import control

        Engine.chunkllm = property(control)
        undo.callback(delattr, Engine, "chunkllm")


def hook_child(undo: contextlib.ExitStack) -> None:
    """Each child has the modules of its part loaded before it calls us (`load_plugins` is their first statement)."""
    from chunkllm_bridge.sglang import algorithm

    if "sglang.srt.managers.scheduler" in sys.modules:
        from chunkllm_bridge.sglang.attach import patch_scheduler

        algorithm.register()
        undo.callback(patch_scheduler())
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        from chunkllm_bridge.patches import sglang as patches

        algorithm.register()
        undo.callback(patches.DP_INIT_INFO.apply(wrap_dp_init_info))


def ensure_launch_patched() -> None:
    """For a launch that is sure to come."""
    from chunkllm_bridge.patches import sglang as patches

    register()
    if _undo is None:
        raise IncompatibleError("the bridge", ["this SGLang lacks what it needs; see `chunkllm doctor`"])
    if not patches.LAUNCH.applied():
        hook_engine(_undo)


# ---- flags ---------------------------------------------------------------------------------------------------------


def wrap_add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        result = original(parser)
        add_flags(parser)
        for action in parser._actions:
            if action.dest == "plugin_strict" and action.choices:  # SGLang's YAML files make false of `off`
                action.type = lambda text: {"true": "on", "false": "off"}.get(text, text)
        return result

    return add_cli_args


def wrap_from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        from chunkllm_bridge.sglang.transport import ATTRIBUTE

        with stopping_on_mistakes():
            wish = wished_by_flags(args)
            passport = None if wish is None else resolve(wish, args)
            if passport is not None:
                from chunkllm_bridge.sglang import algorithm

                vars(args).update(algorithm.launched(passport.spec, args))
            server_args = original(cls, args)
            if passport is not None:
                ensure_launch_patched()
                wire = attrs.evolve(passport, engine={"command_line": True}).to_wire()
                setattr(server_args, ATTRIBUTE, wire)
            elif _armed:
                setattr(server_args, OFF, True)
        return server_args

    return from_cli_args


def resolve(wish: Wish, args: object = None) -> Passport:
    """Everything that can be checked before a model is touched. `args` is a `ServerArgs`, or flags of these names."""
    from chunkllm_bridge.sglang import info, obstacles

    Spec.resolve(file=wish.file, sets=wish.sets, hardware=this_machine(), catalogue=Registry.installed())
    found = info.probes()  # imports the whole engine, which takes seconds: mistakes in the spec are told before
    against = obstacles.against(args, os.environ)
    try:
        passport = launching.resolve(wish, found, info.launch_info(found))
    except IncompatibleError as error:
        raise IncompatibleError(error.name, [*error.reasons, *against]) from None
    if against:
        raise IncompatibleError("the bridge", against)
    return passport


# ---- the launch ----------------------------------------------------------------------------------------------------


def wrap_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `Engine._launch_subprocesses`: straight through unless a passport is on the arguments."""

    @functools.wraps(original)
    def launch_subprocesses(cls: type, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        passport = boarding(server_args)
        if passport is None:
            return original(cls, server_args, *args, **kwargs)
        by_command = passport.engine.get("command_line", False)
        with stopping_on_mistakes() if by_command else contextlib.nullcontext():
            return launch(functools.partial(original, cls, server_args, *args, **kwargs), server_args, passport)

    return launch_subprocesses


def boarding(server_args: Any) -> Passport | None:
    """The passport of this launch. Where a program was armed, it is made here."""
    from chunkllm_bridge.sglang.transport import ATTRIBUTE, passport_of

    file = os.environ.get(CONFIG)
    if _armed and file and not hasattr(server_args, ATTRIBUTE) and not hasattr(server_args, OFF):
        from chunkllm_bridge.sglang import algorithm

        passport = resolve(Wish(Path(file)), server_args)
        for name, value in algorithm.launched(passport.spec, server_args).items():
            setattr(server_args, name, value)
        setattr(server_args, ATTRIBUTE, passport.to_wire())
    return passport_of(server_args)


def launch(start: Callable[[], Any], server_args: Any, passport: Passport) -> Any:
    """Start the engine's processes and shake hands with each. Whatever stops that, none of them stays behind."""
    from chunkllm_bridge.patches import sglang as patches
    from chunkllm_bridge.sglang import children, control, obstacles, refusal

    if reasons := obstacles.against(server_args, os.environ):
        raise IncompatibleError("the bridge", reasons)
    passport.verify("launching process")
    http = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http is not None and _undo is not None and not patches.SERVE.applied():
        _undo.callback(patches.SERVE.apply(control.wrap_serving))
    with children.ending() as stop:
        with refusal.collected() as file, children.attaching():
            try:
                result = start()
            except Exception:
                if reasons := refusal.told(file):
                    raise IncompatibleError("the bridge", reasons) from None
                raise
        manager, _, _, schedulers, watchdog, *_ = result
        if manager is not None:  # else the first node asks our schedulers together with its own
            try:
                control.attach(manager, schedulers, passport)
            except BaseException:
                watchdog.stop()  # it would take the end of a scheduler for a crash, and end us
                control.hang_up(manager)
                raise
        stop.pop_all()
    return result


def wrap_dp_init_info(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Around `DataParallelController.get_init_info`: what its schedulers said of us goes on to who launched it."""

    @functools.wraps(original)
    def get_init_info(controller: Any) -> dict[str, Any]:
        reports = [info.get(launching.NAME) for info in controller._scheduler_init_infos]
        return {**original(controller), launching.NAME: reports}

    return get_init_info
