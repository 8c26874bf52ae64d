"""A small engine without a model: it schedules, preempts and emits tokens as an engine does, and fails on cue."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from chunkllm_bridge.common.abi import EngineInfo, Seam
from chunkllm_bridge.common.quota import Lease, Ledger, pages_for

CAPABILITIES = frozenset(
    {"kv.quota", "batch.window", "attn.switch", "spec.chain", "spec.tree", "fp8.weights", "control", "metrics", "tp"}
    | {f"seam.{seam.value}" for seam in Seam}
)
STRATEGIES = ("paged", "flash2")  # for attention
FORMATS = ("fp8_e4m3",)  # for weights
LAYERS = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
GIB = 2**30  # bytes of one KV block, so that 64 blocks fill the device: a memory ratio is a number of blocks / 64
MEMORY = 64 * GIB
STEP_SECONDS = 0.004
TENANT = "another tenant"
HIDDEN, VOCAB = 8, 1000


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def token_at(request_id: str, position: int) -> int:
    """The model: the token at a position of a request, whoever asks and however often."""
    digest = hashlib.blake2b(f"{request_id}:{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB


@attrs.define(kw_only=True)
class Faults:
    """What goes wrong on cue; set at any time."""

    fail_at_page: int = 0  # the so many-th page asked for from now on is not to be had, once
    steal: int = 0  # pages that another tenant takes, once, after a check and before the allocation it promised
    aborted_steps: set[int] = attrs.field(factory=set)  # scheduled and then rolled back
    refusing_ranks: set[int] = attrs.field(factory=set)  # they refuse to prepare a change


@attrs.define(eq=False, kw_only=True)
class Request:
    """A prompt and what became of it."""

    id: str
    prompt: int  # tokens
    max_tokens: int
    arrived: float
    tokens: list[int] = attrs.field(factory=list)
    drafts: tuple[int, ...] = ()  # to be verified in the next step
    parents: tuple[int, ...] | None = None  # where they are a tree: each one's parent, -1 = the last token
    lease: Lease | None = None
    scheduled: bool = False  # at least once
    preemptions: int = 0
    aborted: bool = False

    @property
    def length(self) -> int:
        return self.prompt + len(self.tokens)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_tokens


class FakeEngine:
    """Schedules, preempts and emits tokens as an engine does; deterministic, and its clock is its own."""

    WRAPPED = ("free_blocks", "allocate", "schedule", "forward", "roll_back")
    """The functions that a bridge wraps."""

    def __init__(
        self,
        *,
        blocks: int = 24,
        block_size: int = 4,
        max_running: int = 8,
        budget_tokens: int = 64,
        ranks: int = 1,
        device: str = "fake",
        capabilities: frozenset[str] = CAPABILITIES,
        arrivals_possible: bool = True,
    ) -> None:
        self.clock, self.faults = Clock(), Faults()
        self.pool = Ledger(blocks, name="kv", clock=self.clock)
        self.block_size, self.max_running, self.budget_tokens = block_size, max_running, budget_tokens
        self.arrivals_possible = arrivals_possible
        self.lookahead = 0  # slots for draft tokens
        self.index = 0
        self.requests: list[Request] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.strategies: Counter[str] = Counter()  # passes by attention strategy; only those that a plugin chose
        self.formats: dict[str, str] = {}  # layer -> format that a plugin chose
        self.info = EngineInfo(
            engine="fake",
            version="1",
            role="core",
            capabilities=capabilities,
            model="hash",
            layers=len(LAYERS),
            heads=2,
            kv_heads=2,
            head_size=HIDDEN // 2,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            dtype="float32",
            kv_dtype="float32",
            block_size=block_size,
            block_bytes=GIB,
            total_blocks=blocks,
            max_model_len=blocks * block_size,
            max_running=max_running,
            device=device,
            device_memory=MEMORY,
            world_size=ranks,
        )

    # ---- for tests ----

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What the engine would call now: equal before and after when nothing stayed wrapped."""
        return {name: getattr(self, name) for name in self.WRAPPED}

    def add(self, *, prompt: int = 5, max_tokens: int = 8) -> Request:
        if pages_for(prompt + max_tokens, self.block_size) > self.pool.total:
            raise ValueError(f"{prompt} + {max_tokens} tokens are more than the whole pool")
        request = Request(id=f"r{len(self.requests)}", prompt=prompt, max_tokens=max_tokens, arrived=self.clock())
        self.requests.append(request)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """The client went away; harmless in any state."""
        request.aborted = True
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._release(request)

    def run(self, limit: int = 5_000) -> dict[str, list[int]]:
        """Step until everybody has finished; tokens by request."""
        for _ in range(limit):
            if not (self.waiting or self.running):
                return {request.id: request.tokens for request in self.requests}
            self.step()
        raise AssertionError(f"no end after {limit} steps: {len(self.running)} running, {len(self.waiting)} waiting")

    # ---- the engine ----

    def step(self) -> None:
        self.index += 1
        self.clock.advance(STEP_SECONDS)
        batch = self.schedule()
        if self.index in self.faults.aborted_steps:
            self.roll_back(batch)
        else:
            self.forward(batch)
        for request in batch:
            if request.finished:
                self.running.remove(request)
                self._release(request, cache=True)
        self.pool.revoke(TENANT)
        self.pool.check()

    def schedule(self) -> list[Request]:
        """Room for everybody who runs, the last giving way, then for those who wait; the batch of this step."""
        for request in tuple(self.running):
            while request in self.running and not self.allocate(request, self._pages(request)):
                self.preempt(self.running[-1])
        budget = self.budget_tokens
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            spent = request.length > budget < self.budget_tokens  # a longer prompt than the budget goes alone
            if spent or not self.allocate(request, self._pages(request)):
                break
            budget -= request.length
            request.scheduled = True
            self.running.append(self.waiting.pop(0))
        return list(self.running)

    def held(self) -> int:
        """Blocks that requests hold."""
        return self.pool.counts.held - self.pool.held_by(TENANT)

    def free_blocks(self) -> int:
        return self.pool.counts.available

    def allocate(self, request: Request, pages: int) -> bool:
        """Bring the request to so many pages: all that are missing, or none."""
        missing = pages - (request.lease.units if request.lease else 0)
        if missing > self.free_blocks():
            return False
        if missing > 0 and self.faults.steal:
            self.pool.lease(TENANT, min(self.faults.steal, self.pool.counts.available))
            self.faults.steal = 0
        with contextlib.ExitStack() as undo:
            lease = request.lease
            if lease is None:
                lease = self.pool.lease(request.id, 0)
                assert lease is not None, "nothing is always granted"
                undo.callback(lease.close)
            for _ in range(missing):
                if self._page_fails() or not lease.grow(1):
                    return False
                undo.callback(lease.shrink, 1)
            undo.pop_all()
        request.lease = lease
        return True

    def preempt(self, request: Request) -> None:
        """Back to the head of the queue; its tokens are kept, its pages are not."""
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._release(request)
        request.preemptions += 1
        request.drafts = ()

    def forward(self, batch: Sequence[Request]) -> None:
        """Emit the drafts that the model agrees with, and one token of its own."""
        for request in batch:
            truth = [token_at(request.id, request.length + ahead) for ahead in range(agreed(request) + 1)]
            request.tokens += truth[: request.max_tokens - len(request.tokens)]
            request.drafts = ()

    def roll_back(self, batch: Sequence[Request]) -> None:
        for request in batch:
            request.drafts = ()

    def _pages(self, request: Request) -> int:
        most = request.prompt + request.max_tokens
        return pages_for(min(request.length + 1 + self.lookahead, most), self.block_size)

    def _page_fails(self) -> bool:
        if self.faults.fail_at_page == 0:
            return False
        self.faults.fail_at_page -= 1
        return self.faults.fail_at_page == 0

    def _release(self, request: Request, *, cache: bool = False) -> None:
        if request.lease is not None:
            request.lease.close(cache=cache)
            request.lease = None


def agreed(request: Request) -> int:
    """The drafts on the longest path on which the model agrees with each."""
    nodes = list(zip(request.parents or range(-1, len(request.drafts) - 1), request.drafts, strict=False))
    node, depth = -1, 0
    while True:
        right = token_at(request.id, request.length + depth)
        found = [at for at, (parent, draft) in enumerate(nodes) if parent == node and draft == right]
        if not found:
            return depth
        node, depth = found[0], depth + 1
