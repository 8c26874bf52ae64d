"""The bridge in an engine without a model, shipped for plugin authors: it asks plugins as the real adapters do.

See `attach`; `conformance` builds on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import TracebackType
from typing import Any, Self

import attrs

from chunkllm_bridge.common.abi import BatchingStep, BlocksStep, EngineInfo, Plugin, Seam
from chunkllm_bridge.common.control import CoreDesk, Ports
from chunkllm_bridge.common.fake import CAPABILITIES, Clock, FakeEngine, Faults, Request, token_at
from chunkllm_bridge.common.fake_workers import FakeWorkers
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.launching import draft_slots
from chunkllm_bridge.common.profiles import Hardware
from chunkllm_bridge.common.quota import PoolQuota
from chunkllm_bridge.common.registry import BUILT_IN, GROUP, Registry
from chunkllm_bridge.common.snapshots import Snapshots
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.common.values import to_text

__all__ = [
    "CAPABILITIES",
    "Clock",
    "FakeBridge",
    "FakeCatalogue",
    "FakeEngine",
    "Faults",
    "Request",
    "attach",
    "entry_point",
    "spec_for",
    "token_at",
]

CORE_SEAMS = frozenset({Seam.BLOCKS, Seam.BATCHING})

Settings = str | Mapping[str, Any]
"""A spec file's text, or values by dotted key."""


class FakeCatalogue(Registry):
    """Plugin classes that can be named without being installed, beside the bridge's own."""

    def __init__(self, *classes: type[Plugin]) -> None:
        own = [point for point in entry_points(group=GROUP) if point.value.startswith(BUILT_IN)]
        fresh = [entry_point(cls) for cls in classes if not cls.__module__.startswith(BUILT_IN)]
        super().__init__([*own, *fresh])
        for cls in classes:
            self._classes[cls.spec.name], self._facts[cls.spec.name] = cls, cls.spec


def entry_point(cls: type[Plugin]) -> EntryPoint:
    """What the plugin's distribution would declare."""
    return EntryPoint(name=cls.spec.name, value=f"{cls.__module__}:{cls.__qualname__}", group=GROUP)


def spec_for(engine: FakeEngine, settings: Settings, catalogue: Registry) -> Spec:
    """The spec as a launch on this engine would resolve it."""
    info = engine.info
    hardware = Hardware(
        device=info.device,
        name=info.device,
        memory_bytes=info.device_memory,
        compute_capability=None if info.device == "cpu" else (8, 9),
    )
    text = settings if isinstance(settings, str) else None
    sets = [] if isinstance(settings, str) else [f"{key}={to_text(value)}" for key, value in settings.items()]
    return Spec.resolve(file=None, text=text, sets=sets, hardware=hardware, catalogue=catalogue)


def launched(info: EngineInfo, spec: Spec, catalogue: Registry) -> EngineInfo:
    """The engine's facts once it was launched with this spec: it may have made room for drafts."""
    tokens, nodes = draft_slots(spec, catalogue) or (0, 0)
    verifies_trees = "spec.tree" in info.capabilities
    return attrs.evolve(info, draft_tokens=tokens, draft_nodes=nodes if verifies_trees else tokens)


def attach(
    engine: FakeEngine, settings: Settings, *plugins: type[Plugin], snapshots: Snapshots | None = None
) -> FakeBridge:
    """Attach the bridge with these plugins, or raise with every reason and leave no trace.

    ```python
    engine = FakeEngine(blocks=16)
    with attach(engine, {"plugins.mine.size": 4}, MyPlugin):
        engine.add(prompt=5, max_tokens=8)
        tokens = engine.run()
    ```
    """
    catalogue = FakeCatalogue(*plugins)
    return FakeBridge(engine, spec_for(engine, settings, catalogue), catalogue, snapshots=snapshots)


class FakeBridge:
    """An adapter for all five seams. `close()` undoes everything, newest first."""

    def __init__(
        self, engine: FakeEngine, spec: Spec, catalogue: Registry, *, snapshots: Snapshots | None = None
    ) -> None:
        self.engine = engine
        self.quota = PoolQuota(engine.pool.total)
        self.holds = 0  # steps in which new prefills were held
        self._hiding = False
        with contextlib.ExitStack() as undo:
            undo.callback(setattr, engine, "info", engine.info)
            engine.info = launched(engine.info, spec, catalogue)
            self.host = Host(spec, catalogue, engine.info, CORE_SEAMS, clock=engine.clock)
            undo.callback(self.host.close)
            self.workers = FakeWorkers(engine, spec, catalogue)
            undo.callback(self.workers.close)
            wrappers: dict[str, Callable[..., Any]] = {
                "free_blocks": self._free_blocks,
                "allocate": self._allocate,
                "schedule": self._schedule,
                "forward": self.workers.forward,
                "roll_back": self.workers.roll_back,
            }
            for name, wrapper in wrappers.items():
                setattr(engine, name, functools.partial(wrapper, getattr(engine, name)))
                undo.callback(delattr, engine, name)
            self._undo = undo.pop_all()
        ports = Ports(
            ranks=self.workers.handle, pool=self._pool, requests=self._requests, committed=self._refresh_limit
        )
        self.desk = CoreDesk(self.host, ports, snapshots)
        self._refresh_limit()

    def set(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to `chunkllm set`."""
        return self.desk.handle({"command": "set", "values": values})

    def status(self) -> dict[str, Any]:
        return dict(self.desk.handle({"command": "status"})["data"])

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- control ----

    def _pool(self) -> dict[str, Any]:
        counts, steps = self.engine.pool.counts, self.engine.index
        return {
            **attrs.asdict(counts),
            **self.quota.as_dict(),
            "conserved": counts.conserved,
            "window_holds": self.holds,
            "steps": steps,
        }

    def _requests(self) -> dict[str, Any]:
        return {"running": len(self.engine.running), "waiting": len(self.engine.waiting)}

    # ---- BLOCKS ----

    def _refresh_limit(self, *, in_step: bool = False) -> None:
        counts = self.engine.pool.counts
        step = BlocksStep(
            index=self.engine.index,
            total=counts.total,
            held=counts.held,
            available=counts.available,
            **self._requests(),
        )
        self.quota.set_limit(self.host.block_limit(step, in_step=in_step))

    def _free_blocks(self, original: Callable[[], int]) -> int:
        return self.quota.hidden_free(original()) if self._hiding else original()

    def _allocate(self, original: Callable[..., bool], request: Request, pages: int) -> bool:
        if self.quota.reserve() == 0:
            return original(request, pages)
        self._hiding = True
        try:
            granted = original(request, pages)
        finally:
            self._hiding = False
        sole = self.engine.running in ([], [request])
        if self.quota.judge(granted=granted, sole=sole).overdraft:
            granted = original(request, pages)
        return granted

    def _schedule(self, original: Callable[[], list[Request]]) -> list[Request]:
        engine = self.engine
        self._refresh_limit(in_step=True)
        while len(engine.running) > 1 and self.quota.excess(engine.held()):
            engine.preempt(engine.running[-1])
            self.quota.note_preempted()
        late = self._new_prefills()
        self.holds += bool(late)
        engine.waiting = [request for request in engine.waiting if request not in late]
        try:
            batch = original()
        finally:
            engine.waiting += late
        held = engine.held()
        self.quota.observe(held, sole=len(batch) <= 1)
        self.host.settle_limit(engine.index, held)
        return batch

    # ---- BATCHING ----

    def _new_prefills(self) -> list[Request]:
        """Requests that were never scheduled, when they are to wait one more step; else none."""
        engine = self.engine
        new = [request for request in engine.waiting if not request.scheduled]
        if not new or self.host.window == 0.0:
            return []
        step = BatchingStep(
            index=engine.index,
            new_waiting=len(new),
            running=len(engine.running),
            slots=engine.max_running - len(engine.running),
            waiting_tokens=sum(request.prompt for request in new),
            budget_tokens=engine.budget_tokens,
            oldest_wait=engine.clock() - min(request.arrived for request in new),
            arrivals_possible=engine.arrivals_possible,
        )
        return new if self.host.hold(step) else []
