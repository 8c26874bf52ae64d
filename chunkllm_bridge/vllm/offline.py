"""vLLM's offline class with the bridge attached, and control from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import LLM as VllmLLM

from chunkllm_bridge.common import remote
from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.common.launching import NAME, wish_of_arguments
from chunkllm_bridge.common.passport import KEY, check_handshake
from chunkllm_bridge.vllm import launch
from chunkllm_bridge.vllm.control import CALL, CORE


class LLM(VllmLLM):  # type: ignore[misc]  # an engine is Any to us
    """`vllm.LLM` that takes the launch flags as arguments: `LLM(model, plugin="chunkllm", plugin_config="spec.toml")`.

    Raises `ConfigError` or `IncompatibleError` before the model is loaded. `llm.chunkllm` controls the running engine.
    """

    def __init__(
        self,
        *args: Any,
        plugin: str | None = None,
        plugin_config: str | Path | None = None,
        plugin_set: Sequence[str] | Mapping[str, Any] = (),
        **kwargs: Any,
    ) -> None:
        wish = wish_of_arguments(plugin, plugin_config, plugin_set)
        if wish is None:
            super().__init__(*args, **kwargs)
            return
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is not None and NAME not in allowed.split(","):
            reason = f"VLLM_PLUGINS={allowed} does not name {NAME}, so vLLM would not load it; add it there"
            raise IncompatibleError("the bridge", [reason])
        passport = launch.resolve(wish)
        launch.register()
        others = kwargs.pop("additional_config", None) or {}
        super().__init__(*args, additional_config={**others, KEY: passport.to_wire()}, **kwargs)
        self.chunkllm = Control(self.llm_engine.engine_core)
        check_handshake(self.chunkllm.status(), passport, CORE)


class Control(remote.Control):
    """Commands to an offline engine. Each raises `ControlError` with the engine's reason where it is refused."""

    def __init__(self, engine_core: Any) -> None:
        self._core = engine_core

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        inner = getattr(self._core, "engine_core", None)  # VLLM_ENABLE_V1_MULTIPROCESSING=0: the engine is right here
        if inner is not None and not hasattr(inner, CALL):
            raise ControlError("the bridge is not attached to this engine any more", 503)
        answer: dict[str, Any] = (
            getattr(inner, CALL)(message) if inner is not None else self._core.call_utility(CALL, message)
        )
        return answer
