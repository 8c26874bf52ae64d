"""The resolved spec on its way into every process of an engine, and what each must find on checking it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from chunkllm_bridge.common.errors import BridgeError, IncompatibleError
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.seating import fingerprint
from chunkllm_bridge.common.spec import Spec

KEY = "chunkllm"
"""Our key wherever a passport travels in something of the engine's."""


@attrs.frozen(kw_only=True)
class Passport:
    """Made once, where the engine is launched; `verify` compares it with what another process sees."""

    spec: Spec
    fingerprint: str
    strict: bool = True
    engine: Mapping[str, Any] = attrs.field(factory=dict)  # what one adapter wants to carry along, as plain data

    @classmethod
    def issue(cls, spec: Spec, registry: Registry, *, strict: bool = True) -> Passport:
        return cls(spec=spec, fingerprint=fingerprint(spec, registry), strict=strict)

    def to_wire(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_wire(),
            "fingerprint": self.fingerprint,
            "strict": self.strict,
            "engine": dict(self.engine),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Passport:
        return cls(
            spec=Spec.from_wire(wire["spec"]),
            fingerprint=wire["fingerprint"],
            strict=wire["strict"],
            engine=dict(wire["engine"]),
        )

    @staticmethod
    def is_wire(value: object) -> bool:
        """Whether this is a passport on its way, and not what somebody wrote under our key."""
        return isinstance(value, Mapping) and "fingerprint" in value

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


def check_handshake(status: Mapping[str, Any], passport: Passport, core: str) -> None:
    """Compare every engine and worker in a status with the passport. Raises `IncompatibleError` naming each.

    `core` is what this engine calls the process that schedules.
    """
    reasons = []
    for number, engine in enumerate(status.get("engines", [status])):
        for place in [{**engine, "role": core, "rank": number}, *engine["workers"]]:
            if (found := place.get("fingerprint")) != passport.fingerprint:
                where = f"engine {number}: {place['role']} of rank {place['rank']}"
                reasons.append(f"{where} has fingerprint {found}, where it was launched {passport.fingerprint}")
    if reasons:
        raise IncompatibleError("the bridge", reasons)
