"""Attach the bridge inside EngineCore and its workers: all of it before the first request, or none."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chunkllm_bridge.common.abi import EngineInfo, Seam
from chunkllm_bridge.common.control import CoreDesk, Ports, RankDesk
from chunkllm_bridge.common.drafts import Drafting
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.passport import Passport
from chunkllm_bridge.common.pool import (
    allowed_reasons,
    check_ratio,
    check_shares,
    layer_reasons,
    ratio_bytes,
)
from chunkllm_bridge.common.seating import disabled
from chunkllm_bridge.common.snapshots import Snapshots
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.patches import vllm as patches
from chunkllm_bridge.vllm import info as facts
from chunkllm_bridge.vllm.blocks import SchedulerBridge
from chunkllm_bridge.vllm.drafts import DraftsBridge
from chunkllm_bridge.vllm.transport import in_config
from chunkllm_bridge.vllm.weights import Weights

log = get_logger("vllm.attach")

CORE_SEAMS = frozenset({Seam.BLOCKS, Seam.BATCHING})
WORKER_SEAMS = frozenset({Seam.ATTENTION, Seam.DRAFTS, Seam.WEIGHTS})

_attached: weakref.WeakKeyDictionary[Any, WorkerAttachment] = weakref.WeakKeyDictionary()  # this process's workers


class NotAttached:
    """Stands in for the scheduler at launch; attaching puts the real one back. Whoever meets it is not attached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise IncompatibleError(
            "the bridge in the EngineCore process",
            ["--plugin chunkllm was asked for, but the bridge was not loaded there; does VLLM_PLUGINS name chunkllm?"],
        )


GUARD = f"{NotAttached.__module__}.{NotAttached.__qualname__}"


# ---- worker --------------------------------------------------------------------------------------------------------


def worker_call(worker: Any, verb: str, wire: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Runs in each worker, between two forward passes; sent by reference through `collective_rpc`."""
    worker = getattr(worker, "worker", worker)  # the multiprocess executor hands over its wrapper
    if verb == "attach":
        assert wire is not None
        try:
            attachment = _attached[worker] = WorkerAttachment(worker, Passport.from_wire(wire))
        except IncompatibleError as error:
            return {"ok": False, "rank": worker.rank, "error": str(error)}
        weights = sum(p.numel() * p.element_size() for p in worker.model_runner.get_model().parameters())
        host = attachment.desk.host
        return {"ok": True, "rank": worker.rank, "fingerprint": host.fingerprint(), "weights": weights}
    return _attached[worker].handle(verb, wire)


class WorkerAttachment:
    """What the bridge is in one worker. `close()` undoes everything, newest first."""

    def __init__(self, worker: Any, passport: Passport) -> None:
        registry = passport.verify(f"worker of rank {worker.rank}")
        about = facts.engine_info(worker.vllm_config, role="worker", rank=worker.rank)
        runner = worker.model_runner
        self.drafts: DraftsBridge | None = None
        with contextlib.ExitStack() as undo:
            host = Host(passport.spec, registry, about, WORKER_SEAMS, model=Weights(runner))
            undo.callback(host.close)
            drafting = Drafting(host) if about.draft_tokens else None
            self.desk = RankDesk(host, drafting)
            if drafting is not None:
                asks = worker.rank == facts.output_rank(worker.vllm_config)
                self.drafts = DraftsBridge(runner, drafting, asks=asks)
                self.drafts.install()
                undo.callback(self.drafts.close)
            undo.callback(patches.WORKER_SHUTDOWN.apply_to(worker, closing(self)))
            self._undo = undo.pop_all()

    def handle(self, verb: str, wire: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self.drafts is not None:
            self.drafts.interrupt()
        return self.desk.handle(verb, wire)

    def close(self) -> None:
        self._undo.close()


def closing(attachment: WorkerAttachment | CoreAttachment) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Close an attachment before what it is attached to shuts down."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def shutdown(*args: Any, **kwargs: Any) -> Any:
            try:
                attachment.close()
            except Exception as error:  # the engine ends all the same
                log.warning("bridge.close_failed", reason=str(error), exc_info=error)
            return original(*args, **kwargs)

        return shutdown

    return wrap


# ---- core ----------------------------------------------------------------------------------------------------------


def wrap_initialize_kv_caches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `EngineCore._initialize_kv_caches`: straight through unless a passport is in the config."""

    @functools.wraps(original)
    def initialize_kv_caches(core: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        passport = in_config(vllm_config)
        if passport is None:
            return original(core, vllm_config, *args, **kwargs)
        return CoreAttachment(core, passport).around(original, vllm_config, *args, **kwargs)

    return initialize_kv_caches


class CoreAttachment:
    """What the bridge is in one EngineCore. `close()` undoes everything, newest first."""

    def __init__(self, core: Any, passport: Passport) -> None:
        self.core, self.passport = core, passport
        self.registry = passport.verify("EngineCore process")
        self._undo = contextlib.ExitStack()
        self.scheduler: SchedulerBridge | None = None

    def around(self, original: Callable[..., Any], vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        core, spec = self.core, self.passport.spec
        with contextlib.ExitStack() as undo:
            about = facts.engine_info(vllm_config, role="core")
            weights = self._attach_workers()
            check_shares(spec, about, weights, disabled(spec, self.registry, about))
            with contextlib.ExitStack() as sizing:
                sizing.callback(cap_available_memory(core.model_executor, spec, about))
                sizing.callback(check_pool(core.model_executor, spec, about))
                kv_cache_config = original(core, vllm_config, *args, **kwargs)
            about = facts.with_pool(about, kv_cache_config, vllm_config.cache_config.block_size)
            host = Host(spec, self.registry, about, CORE_SEAMS)
            undo.callback(host.close)
            undo.callback(self._await_scheduler(vllm_config.scheduler_config, host))
            snapshots = Snapshots.of(spec) if spec.origin is not None else None
            desk = CoreDesk(host, self._ports(about), snapshots)
            core.chunkllm_control = desk.handle
            undo.callback(delattr, core, "chunkllm_control")
            core.chunkllm = self
            undo.callback(delattr, core, "chunkllm")
            undo.callback(patches.SHUTDOWN.apply_to(core, closing(self)))
            if snapshots is not None:
                snapshots.save(spec)
            self._undo = undo.pop_all()
        log.info(
            "bridge.attached",
            engine="vllm",
            version=about.version,
            fingerprint=self.passport.fingerprint,
            blocks=about.total_blocks,
            plugins=sorted(plugin["name"] for plugin in host.report()["plugins"]),
        )
        return kv_cache_config

    def close(self) -> None:
        self._undo.close()

    def _attach_workers(self) -> int:
        """Every worker builds its host and answers with its fingerprint. Returns the largest rank's weight bytes."""
        replies = self.core.model_executor.collective_rpc(worker_call, args=("attach", self.passport.to_wire()))
        reasons = [f"rank {reply['rank']}: {reply['error']}" for reply in replies if not reply["ok"]]
        if reasons:
            raise IncompatibleError("the bridge", reasons)
        return int(max(reply["weights"] for reply in replies))

    def _await_scheduler(self, scheduler_config: Any, host: Host) -> Callable[[], None]:
        """Bridge the scheduler as soon as the engine has made its own choice of one."""
        scheduler_config.scheduler_cls = self.passport.engine.get("scheduler_cls")

        def wrap(original: Callable[[], type]) -> Callable[[], Callable[..., Any]]:
            def get_scheduler_cls() -> Callable[..., Any]:
                chosen = original()

                def make(*args: Any, **kwargs: Any) -> Any:
                    scheduler = chosen(*args, **kwargs)
                    self.scheduler = SchedulerBridge(scheduler, host, arrivals_possible=runs_apart(self.core))
                    self.scheduler.install()
                    self._undo.callback(self.scheduler.close)
                    return scheduler

                return make

            return get_scheduler_cls

        return patches.GET_SCHEDULER_CLS.apply_to(scheduler_config, wrap)

    def _ports(self, about: EngineInfo) -> Ports:
        def ranks(verb: str, wire: Mapping[str, Any] | None = None) -> Sequence[Mapping[str, Any]]:
            answers: list[dict[str, Any]] = self.core.model_executor.collective_rpc(worker_call, args=(verb, wire))
            return answers

        return Ports(
            ranks=ranks,
            pool=lambda: self._bridge.status(about),
            requests=lambda: {
                "running": len(self._bridge.scheduler.running),
                "waiting": len(self._bridge.scheduler.waiting),
            },
            check=lambda spec: check_ratio(spec, about),
            committed=self._refresh,
        )

    def _refresh(self) -> None:
        self._bridge.refresh_limit()
        host = self._bridge.host
        if host is not None and host.info.draft_tokens:  # while nobody drafts, spare the workers a call in every step
            self.core.check_for_draft_tokens = host.spec["speculative.plugin"] is not None

    @property
    def _bridge(self) -> SchedulerBridge:
        assert self.scheduler is not None, "no scheduler yet"
        return self.scheduler


def runs_apart(core: Any) -> bool:
    """Whether requests can arrive while this EngineCore steps: not when its caller steps it in the same thread."""
    from vllm.v1.engine.core import EngineCoreProc

    return isinstance(core, EngineCoreProc)


# ---- the pool ------------------------------------------------------------------------------------------------------


def cap_available_memory(executor: Any, spec: Spec, about: EngineInfo) -> Callable[[], None]:
    """Let the pool be what the engine measures, but no more than the ratio."""
    allowed = ratio_bytes(spec, about)
    measure = executor.determine_available_memory

    def determine_available_memory() -> list[int]:
        return [available if allowed is None else min(available, allowed) for available in measure()]

    executor.determine_available_memory = determine_available_memory
    return lambda: delattr(executor, "determine_available_memory")


def check_pool(executor: Any, spec: Spec, about: EngineInfo) -> Callable[[], None]:
    """Refuse a pool that breaks the spec before it is allocated; undone afterwards."""
    initialize = executor.initialize_from_config

    def initialize_from_config(kv_cache_configs: list[Any]) -> Any:
        for rank, config in enumerate(kv_cache_configs):
            if reasons := pool_reasons(config, spec, about):
                raise IncompatibleError(f"the KV pool of rank {rank}", reasons)
        return initialize(kv_cache_configs)

    executor.initialize_from_config = initialize_from_config
    return lambda: delattr(executor, "initialize_from_config")


def pool_reasons(config: Any, spec: Spec, about: EngineInfo) -> list[str]:
    """What is wrong with one rank's pool, with layers, bytes and the ratio that would fit."""
    sizes, total = facts.layer_bytes(config), facts.pool_bytes(config)
    return [
        *layer_reasons(sizes, total, spec, about),
        *allowed_reasons(total, spec, about, "--num-gpu-blocks-override?"),
    ]
