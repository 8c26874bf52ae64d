"""Attach the bridge inside a scheduler process, before the first request: all of it, or none.

SGLang runs one scheduler per rank. The first rank of a tensor-parallel group leads: it holds the plugins that plan for
the scheduler, answers commands, and carries verbs to the others while all of them handle the same command.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from chunkllm_bridge.common.abi import EngineInfo, Seam
from chunkllm_bridge.common.control import CoreDesk, Ports, RankDesk
from chunkllm_bridge.common.drafts import Drafting
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.passport import KEY, Passport
from chunkllm_bridge.common.pool import (
    allowed_reasons,
    check_ratio,
    check_shares,
    layer_reasons,
    ratio_bytes,
)
from chunkllm_bridge.common.seating import disabled
from chunkllm_bridge.common.snapshots import Snapshots
from chunkllm_bridge.patches import sglang as patches
from chunkllm_bridge.sglang import info as facts
from chunkllm_bridge.sglang.blocks import SchedulerBridge
from chunkllm_bridge.sglang.ranks import Ranks
from chunkllm_bridge.sglang.refusal import refusing
from chunkllm_bridge.sglang.transport import Answer, Command, Decision, passport_of
from chunkllm_bridge.sglang.weights import Weights

log = get_logger("sglang.attach")

CORE_SEAMS = frozenset({Seam.BLOCKS, Seam.BATCHING})
WORKER_SEAMS = frozenset({Seam.ATTENTION, Seam.DRAFTS, Seam.WEIGHTS})


def patch_scheduler() -> Callable[[], None]:
    """Make every scheduler of this process one that attaches where a passport is in its arguments."""
    with contextlib.ExitStack() as undo:
        undo.callback(patches.INIT_POOL.apply(wrap_init_pool))
        undo.callback(patches.INIT_INFO.apply(wrap_init_info))
        return undo.pop_all().close


def wrap_init_pool(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Around `Scheduler.init_target_memory_pool`: the model is loaded, and there is no KV pool yet."""

    @functools.wraps(original)
    def init_target_memory_pool(scheduler: Any) -> Any:
        passport = passport_of(scheduler.server_args)
        if passport is None:
            return original(scheduler)
        with refusing():
            scheduler.chunkllm = attachment = SchedulerAttachment(scheduler, passport)
            return attachment.around_pool(original)

    return init_target_memory_pool


def wrap_init_info(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Around `Scheduler.get_init_info`: the scheduler is complete, and nobody was told yet."""

    @functools.wraps(original)
    def get_init_info(scheduler: Any) -> Any:
        attachment = vars(scheduler).get("chunkllm")
        if attachment is None:
            return original(scheduler)
        with refusing():
            attachment.attach()
        return {**original(scheduler), KEY: attachment.report()}

    return get_init_info


def wrap_row_width(original: Callable[[], int]) -> Callable[[], int]:
    """Room in a request's row beyond its context: what two steps reserve, up to a page's end."""

    @functools.wraps(original)
    def get_req_to_token_extra_context_len() -> int:
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

        reserved: int = get_alloc_reserve_per_decode() + get_alloc_page_size()
        return max(original(), reserved)

    return get_req_to_token_extra_context_len


class SchedulerAttachment:
    """What the bridge is in one scheduler process. `close()` undoes everything, newest first."""

    def __init__(self, scheduler: Any, passport: Passport) -> None:
        self.scheduler, self.passport = scheduler, passport
        self.rank = facts.rank()
        self.registry = passport.verify(f"scheduler of rank {self.rank}")
        self._undo = contextlib.ExitStack()

    def around_pool(self, original: Callable[[Any], Any]) -> Any:
        """Let the pool be what the engine measures, but no more than the ratio; refuse one that breaks the spec."""
        spec, about = self.passport.spec, facts.engine_info(self.scheduler, role="core")
        weights = facts.weight_bytes(self.scheduler)
        check_shares(spec, about, weights, disabled(spec, self.registry, about))
        allowed = ratio_bytes(spec, about)

        def wrap_profile(measure: Callable[..., int]) -> Callable[..., int]:
            @functools.wraps(measure)
            def profile_available_bytes(pools: Any, *args: Any, **kwargs: Any) -> int:
                if allowed is None:
                    return measure(pools, *args, **kwargs)
                room = allowed - facts.padding_bytes(pools)
                return room if about.device == "cpu" else min(room, measure(pools, *args, **kwargs))

            return profile_available_bytes

        def wrap_sizes(resolve: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(resolve)
            def resolve_memory_pool_config(pools: Any, *args: Any, **kwargs: Any) -> Any:
                config = resolve(pools, *args, **kwargs)
                sizes, total = facts.layer_bytes(pools, config), facts.pool_bytes(pools, config)
                reasons = [
                    *layer_reasons(sizes, total, spec, about),
                    *allowed_reasons(total, spec, about, "--max-total-tokens?"),
                ]
                if reasons:
                    raise IncompatibleError(f"the KV pool of rank {self.rank}", reasons)
                return config

            return resolve_memory_pool_config

        with contextlib.ExitStack() as sizing:
            sizing.callback(patches.PROFILE_BYTES.apply(wrap_profile))
            sizing.callback(patches.POOL_CONFIG.apply(wrap_sizes))
            if about.draft_tokens:
                sizing.callback(patches.ROW_WIDTH.apply(wrap_row_width))
            return original(self.scheduler)

    def attach(self) -> None:
        """Seat the plugins, wrap the scheduler, and put the first limit in force on every rank."""
        scheduler, spec = self.scheduler, self.passport.spec
        with contextlib.ExitStack() as undo:
            worker = facts.with_pool(facts.engine_info(scheduler, role="worker"), scheduler)
            model = Weights(scheduler.tp_worker.model_runner)
            workers = Host(spec, self.registry, worker, WORKER_SEAMS, model=model)
            undo.callback(workers.close)
            self.desk = RankDesk(workers, self._speculate(workers, undo))
            self.ranks = Ranks(facts.rank_group(scheduler), self._on_rank)
            host = self._lead(spec, worker, undo) if self.ranks.leads else None
            self.bridge = SchedulerBridge(scheduler, host)
            self.bridge.install()
            undo.callback(self.bridge.close)
            undo.callback(self._take_messages())
            undo.callback(patches.RELEASE.apply_to(scheduler, self._wrap_release))
            if host is None:
                self.ranks.follow()
            else:
                self._refresh()
                self.ranks.dismiss()
                log.info(
                    "bridge.attached",
                    engine="sglang",
                    version=worker.version,
                    fingerprint=self.passport.fingerprint,
                    blocks=worker.total_blocks,
                    plugins=sorted(plugin["name"] for plugin in host.report()["plugins"]),
                )
            self._undo = undo.pop_all()

    def _speculate(self, workers: Host, undo: contextlib.ExitStack) -> Drafting | None:
        """Connect the DRAFTS seam to the worker that SGLang made; None where it was launched without."""
        if not workers.info.draft_tokens:
            return None
        from chunkllm_bridge.sglang.drafts import DraftsBridge, leave_room

        worker, drafting = self.scheduler.draft_worker, Drafting(workers)
        worker.bridge = DraftsBridge(drafting, facts.rank_group(self.scheduler))
        undo.callback(setattr, worker, "bridge", None)
        leave_room(self.scheduler)
        return drafting

    def _lead(self, spec: Any, worker: EngineInfo, undo: contextlib.ExitStack) -> Host:
        about = attrs.evolve(worker, role="core")
        host = Host(spec, self.registry, about, CORE_SEAMS)
        undo.callback(host.close)
        snapshots = Snapshots.of(spec) if spec.origin is not None else None
        self.core = CoreDesk(host, self._ports(host, about), snapshots)
        if snapshots is not None:
            snapshots.save(spec)
        return host

    def report(self) -> dict[str, Any]:
        """For the process that started this one."""
        return {"fingerprint": self.desk.host.fingerprint(), "rank": self.rank}

    def close(self) -> None:
        self._undo.close()

    def _wrap_release(self, original: Callable[[], None]) -> Callable[[], None]:
        def release_host_resources() -> None:
            try:
                self.close()
            except Exception as error:  # the engine ends all the same
                log.warning("bridge.close_failed", reason=str(error), exc_info=error)
            return original()

        return release_host_resources

    # ---- messages ----

    def _take_messages(self) -> Callable[[], None]:
        """Into the scheduler's own dispatcher. They come to every rank at the same place in the order of requests."""
        from sglang.utils import TypeBasedDispatcher

        dispatcher = self.scheduler._request_dispatcher
        dispatcher += TypeBasedDispatcher([(Command, self._on_command), (Decision, self._on_decision)])

        def undo() -> None:
            for kind in (Command, Decision):
                dispatcher._mapping.pop(kind, None)

        return undo

    def _on_decision(self, decision: Decision) -> None:
        self.bridge.take(decision)

    def _on_command(self, command: Command) -> Answer | None:
        if not self.ranks.leads:
            self.ranks.follow()
            return None
        try:
            return command.answer(self.core.handle(command.message))
        finally:
            self.ranks.dismiss()

    def _on_rank(self, verb: str, wire: Mapping[str, Any] | None) -> dict[str, Any]:
        if verb != "decide":
            return self.desk.handle(verb, wire)
        assert wire is not None
        self.bridge.take(Decision(**wire))
        return {"ok": True, "rank": self.rank}

    def _ports(self, host: Host, about: EngineInfo) -> Ports:
        return Ports(
            ranks=self.ranks.call,
            pool=lambda: self.bridge.status(about),
            requests=lambda: {
                "running": len(self.bridge.running()),
                "waiting": len(self.scheduler.waiting_queue),
            },
            check=lambda spec: check_ratio(spec, about),
            committed=self._refresh,
        )

    def _refresh(self) -> None:
        """A change shows before the next step, on every rank."""
        decision = self.bridge.decide(in_step=False)
        self.ranks.call("decide", {"limit": decision.limit, "hold_new": decision.hold_new})
