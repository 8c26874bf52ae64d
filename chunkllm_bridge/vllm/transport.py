"""How a spec travels inside vLLM's own config: resolved once at launch, read in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from chunkllm_bridge.common.errors import BridgeError, IncompatibleError
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.seating import fingerprint
from chunkllm_bridge.common.spec import Spec

KEY = "chunkllm"
"""Our key in `VllmConfig.additional_config`."""


class HashedConfig(Mapping[str, Any]):
    """`additional_config` with our key in it, which does not enter the key of vLLM's compile cache.

    vLLM hashes a plain dict whole (`config/vllm.py`), so another quota would compile the model again. What other
    plugins keep here is still hashed, and so is `graph`: what changes the compiled graph.
    """

    def __init__(self, items: Mapping[str, Any], graph: str = "") -> None:
        self._items = dict(items)
        self._graph = graph

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)

    def compute_hash(self) -> str:
        others = {key: value for key, value in self._items.items() if key != KEY}
        if not others and not self._graph:
            return "None"
        text = json.dumps([others, self._graph], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@attrs.frozen(kw_only=True)
class Passport:
    """The resolved spec and what every process must find on checking it."""

    spec: Spec
    fingerprint: str
    strict: bool = True
    scheduler_cls: str | None = None  # the user's --scheduler-cls, while ours stands guard in its place

    @classmethod
    def issue(cls, spec: Spec, registry: Registry, *, strict: bool = True) -> Passport:
        return cls(spec=spec, fingerprint=fingerprint(spec, registry), strict=strict)

    def to_wire(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_wire(),
            "fingerprint": self.fingerprint,
            "strict": self.strict,
            "scheduler_cls": self.scheduler_cls,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Passport:
        return cls(
            spec=Spec.from_wire(wire["spec"]),
            fingerprint=wire["fingerprint"],
            strict=wire["strict"],
            scheduler_cls=wire["scheduler_cls"],
        )

    @staticmethod
    def travels_in(additional_config: object) -> bool:
        """Whether this is a passport already, and not a user's wish."""
        wish = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        return isinstance(wish, Mapping) and "fingerprint" in wish

    @classmethod
    def in_config(cls, vllm_config: Any) -> Passport | None:
        """The passport in a `VllmConfig`, or None where the bridge is off."""
        config = vllm_config.additional_config
        return cls.from_wire(config[KEY]) if cls.travels_in(config) else None

    def verify(self, process: str) -> Registry:
        """Check that this process sees the same bridge, plugins and config. Raises `IncompatibleError`."""
        registry = Registry.installed()
        try:
            found = fingerprint(self.spec, registry)
        except BridgeError as error:
            raise IncompatibleError(f"the bridge in the {process}", [str(error)]) from error
        if found != self.fingerprint:
            reason = f"fingerprint {found}, where it was launched {self.fingerprint}: other plugins or versions here"
            raise IncompatibleError(f"the bridge in the {process}", [reason])
        return registry
