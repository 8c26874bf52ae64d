"""Control of a running engine from Python; each adapter brings the way there."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from chunkllm_bridge.common.control import Command, Config, Plugins, Reply, Set, Status, encode
from chunkllm_bridge.common.errors import ControlError


class Control(abc.ABC):
    """Commands to an engine of this program. Each raises `ControlError` with the reason where it is refused."""

    def status(self) -> dict[str, Any]:
        return self._ask(Status())

    def config(self) -> dict[str, Any]:
        return self._ask(Config())

    def plugins(self) -> dict[str, Any]:
        return self._ask(Plugins())

    def set(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change parameters on all ranks before the next step, e.g. `set({"kv_cache.memory_ratio": 0.1})`."""
        return self._ask(Set(values=dict(values)))

    def _ask(self, command: Command) -> dict[str, Any]:
        reply = Reply(**self._send(encode(command)))
        if reply.error:
            raise ControlError(reply.error, reply.status)
        return reply.data

    @abc.abstractmethod
    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to one message, both as plain data. Raises `ControlError` where there is nobody to ask."""
