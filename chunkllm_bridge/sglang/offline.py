"""SGLang's engine in a Python program, with the bridge attached, and control from there."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
from sglang.srt.entrypoints.engine import Engine as SglangEngine
from sglang.srt.server_args import ServerArgs

from chunkllm_bridge.common import remote
from chunkllm_bridge.common.control import decode
from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.launching import wish_of_arguments
from chunkllm_bridge.sglang import algorithm, launch
from chunkllm_bridge.sglang.control import ATTACHED
from chunkllm_bridge.sglang.transport import ATTRIBUTE


class Control(remote.Control):
    """Commands to an engine in this program. Each raises `ControlError` with the reason where it is refused."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        attached = getattr(self._engine.tokenizer_manager, ATTACHED, None)
        if attached is None:
            raise ControlError("the bridge is not attached to this engine", 503)
        if self._engine.loop.is_running():
            raise ControlError("the engine's event loop is running: call this outside of it", 409)
        return attrs.asdict(self._engine.loop.run_until_complete(attached.line.send(decode(message))))


def control(engine: Any) -> Control:
    """Commands to a running `sglang.Engine`. Raises `AttributeError` where the bridge is not attached."""
    if getattr(engine.tokenizer_manager, ATTACHED, None) is None:
        raise AttributeError("the bridge is not attached to this engine")
    return Control(engine)


class Engine(SglangEngine):  # type: ignore[misc]  # an engine is Any to us
    """`sglang.Engine` that takes the launch flags as arguments: `Engine(model_path=M, plugin="chunkllm",
    plugin_config="spec.toml")`.

    Raises `ConfigError` or `IncompatibleError` before the model is loaded. `engine.chunkllm` controls the engine.
    """

    def __init__(
        self,
        *,
        plugin: str | None = None,
        plugin_config: str | Path | None = None,
        plugin_set: Sequence[str] | Mapping[str, Any] = (),
        **kwargs: Any,
    ) -> None:
        wish = wish_of_arguments(plugin, plugin_config, plugin_set)
        if wish is not None:
            launch.ensure_launch_patched()
            passport = launch.resolve(wish)
            wire, given = passport.to_wire(), kwargs.get("server_args")
            room = algorithm.launched(passport.spec, given or SimpleNamespace(**kwargs))
            if given:
                kwargs["server_args"] = given = copy.deepcopy(given)
                for name, value in {**room, ATTRIBUTE: wire}.items():
                    setattr(given, name, value)
            else:
                kwargs |= room
            cls: Any = type(self)
            make = cls.server_args_class

            def server_args_class(**fields: Any) -> ServerArgs:
                made = make(**fields)
                setattr(made, ATTRIBUTE, wire)
                return made

            self.server_args_class = server_args_class
        super().__init__(**kwargs)

    chunkllm = property(control)
