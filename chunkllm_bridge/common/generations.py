"""One loaded version of a plugin, and several that wait to take their seats together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from chunkllm_bridge.common.abi import Outcome, Plan, Plugin, PluginSpec, Seam
from chunkllm_bridge.common.guard import Guard
from chunkllm_bridge.common.quota import Lease, Ledger
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
    settle: Callable[[Outcome], None] | None  # None: it does not want to hear how a step went
    leases: list[Lease] = attrs.field(factory=list)
    closed: bool = False
    steps: int = 0  # in which it was asked
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)  # a plugin may lease in threads of its own

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def state(self) -> str:
        """ "active" only once it was called on the step path: loaded is not active."""
        if self.guard.tripped:
            return "stepped aside" if self.guard.aside else "tripped"
        return "active" if self.steps else "seated"

    def lease(self, ledger: Ledger, units: int) -> Lease | None:
        """Set memory aside until the plugin gives it back or this generation is closed. None: there is not so much."""
        with self._lock:
            lease = None if self.closed else ledger.lease(self.name, units)
            if lease is not None:
                self.leases = [*(old for old in self.leases if not old.closed), lease]
            return lease

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self.guard.call("close", lambda: self.plugin.close(), None)  # a lookup can fail as a call can
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
