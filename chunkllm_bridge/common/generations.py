"""One loaded version of a plugin, and several that wait to take their seats together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from chunkllm_bridge.common.abi import Memory, Plan, Plugin, PluginSpec, Seam
from chunkllm_bridge.common.guard import Guard
from chunkllm_bridge.common.spec import Spec

VERBS: Mapping[Seam, str] = {seam: f"plan_{seam.value}" for seam in Seam}


@attrs.define(kw_only=True, eq=False)
class Generation:
    """One loaded version of a plugin: code, config and state. Two of one plugin can be alive at once."""

    number: int
    facts: PluginSpec
    plugin: Plugin
    config: object
    guard: Guard
    priority: int
    verbs: dict[Seam, Callable[[Any], Plan | None]]
    leases: list[Memory] = attrs.field(factory=list)
    closed: bool = False

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def state(self) -> str:
        """ "active" only once it was called on the step path: loaded is not active."""
        if self.guard.tripped:
            return "tripped"
        return "active" if any(self.guard.tally.calls[VERBS[seam]] for seam in self.verbs) else "seated"

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.guard.call("close", self.plugin.close, None)
        for lease in self.leases:
            lease.close()

    def report(self) -> dict[str, Any]:
        tally = self.guard.tally
        return {
            "name": self.name,
            "version": self.facts.version,
            "priority": self.priority,
            "generation": self.number,
            "seams": sorted(seam.value for seam in self.verbs),
            "state": self.state,
            "calls": dict(tally.calls),
            "failures": dict(tally.failures),
            "skipped": tally.skipped,
            "seconds": round(tally.seconds, 6),
            "last_failure": tally.last_failure,
            "memory_bytes": sum(lease.units for lease in self.leases),
        }


@attrs.frozen(kw_only=True)
class Pending:
    """New generations, prepared beside the ones in their seats; `Host.commit` or `Host.abandon` ends it."""

    spec: Spec
    fresh: Mapping[str, Generation]
