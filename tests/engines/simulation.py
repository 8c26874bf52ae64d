"""vLLM's own scheduler without a model: a pretended worker says which token comes next."""

from __future__ import annotations

import collections
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from chunkllm_bridge.common.abi import EngineInfo
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.profiles import Hardware
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.vllm import info as facts
from chunkllm_bridge.vllm.attach import CORE_SEAMS
from chunkllm_bridge.vllm.blocks import SchedulerBridge

BLOCK = 16  # tokens
MEMORY = 1_000_000  # bytes of the pretended device; a block has 1,000, so a ratio of 0.001 is one block
BLOCK_BYTES = 1_000


def token(request_id: str, position: int) -> int:
    """What the model says there, whatever happened before."""
    return zlib.crc32(f"{request_id}/{position}".encode()) % 40_000 + 5


def ratio(blocks: int) -> float:
    """`kv_cache.memory_ratio` for so many blocks; the half is for the rounding."""
    return (blocks + 0.5) * BLOCK_BYTES / MEMORY


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@attrs.frozen(kw_only=True)
class Job:
    """A request, and what it must come to."""

    prompt: int  # tokens
    answer: int

    def expected(self, request_id: str) -> list[int]:
        return [token(request_id, self.prompt + place) for place in range(self.answer)]


def vllm_config(
    model: Path, *, overlapped: bool, policy: str = "fcfs", blocks: int = 41, prefix_cache: bool = True, slots: int = 16
) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=512),
        scheduler_config=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=512,
            max_model_len=512,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_cache),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = overlapped
    return config


def make_scheduler(config: VllmConfig, make: Callable[..., Any] | None = None) -> Any:
    """The scheduler of the engine's choice, in the way in which EngineCore makes it."""
    blocks = config.cache_config.num_gpu_blocks
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return (make or config.scheduler_config.get_scheduler_cls())(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def make_host(blocks: int, *sets: str, registry: Registry | None = None) -> Host:
    """What the bridge builds in EngineCore, for a pool of that size."""
    registry = registry or Registry.installed()
    hardware = Hardware(device="cpu", name="cpu", memory_bytes=MEMORY, compute_capability=None)
    about = EngineInfo(
        engine="vllm",
        version=facts.version(),
        role="core",
        capabilities=facts.capabilities(),
        block_size=BLOCK,
        block_bytes=BLOCK_BYTES,
        total_blocks=blocks - 1,
        device_memory=MEMORY,
    )
    spec = Spec.resolve(file=None, sets=sets, hardware=hardware, catalogue=registry)
    return Host(spec, registry, about, CORE_SEAMS)


class Simulation:
    """Steps the scheduler as EngineCore does: `depth` batches in flight, 2 where scheduling overlaps with the model."""

    def __init__(
        self,
        model: Path,
        *,
        overlapped: bool,
        policy: str = "fcfs",
        blocks: int = 41,
        prefix_cache: bool = True,
        slots: int = 16,
        sets: tuple[str, ...] = (),
        bridged: bool = True,
        arrivals_possible: bool = True,
        clock: Callable[[], float] | None = None,
        registry: Registry | None = None,
    ) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        config = vllm_config(
            model, overlapped=overlapped, policy=policy, blocks=blocks, prefix_cache=prefix_cache, slots=slots
        )
        self.scheduler = make_scheduler(config)
        self.depth = 2 if overlapped else 1
        self.jobs: dict[str, Job] = {}
        self.requests: dict[str, Request] = {}
        self.got: dict[str, list[int]] = collections.defaultdict(list)
        self.aborted: set[str] = set()
        self._position: dict[str, int] = {}
        self._flying: collections.deque[tuple[Any, Any]] = collections.deque()
        if bridged:
            self.host = make_host(blocks, *sets, registry=registry)
            options = {} if clock is None else {"clock": clock}
            self.bridge = SchedulerBridge(self.scheduler, self.host, arrivals_possible=arrivals_possible, **options)
            self.bridge.install()

    # -- what happens to an engine --

    def add(self, *, prompt: int, answer: int, priority: int = 0, name: str | None = None) -> str:
        request_id = name or f"r{len(self.jobs)}"
        self.jobs[request_id] = Job(prompt=prompt, answer=answer)
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        request = Request(
            request_id=request_id,
            prompt_token_ids=[token(request_id, place) for place in range(prompt)],
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            priority=priority,
            arrival_time=float(len(self.jobs)),
        )
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def set(self, **values: Any) -> None:
        """As a `set` command between two steps; `__` stands for the dot."""
        dotted = {key.replace("__", "."): value for key, value in values.items()}
        spec = self.host.spec.evolve(dotted, catalogue=self.host.registry)
        self.host.commit(self.host.prepare(spec))
        self.bridge.refresh_limit()

    def limit(self, blocks: int) -> None:
        self.set(kv_cache__memory_ratio=ratio(blocks))

    def step(self) -> Any:
        """Schedule one batch, and take back what is due. Returns what was scheduled."""
        output = self.scheduler.schedule()
        self._flying.append((output, self._model(output)))
        idle = not output.total_num_scheduled_tokens
        while self._flying and (idle or len(self._flying) >= self.depth):
            self._land()
        return output

    def drain(self, most: int = 5000) -> Iterator[Any]:
        """Step until nothing is left to do."""
        for _ in range(most):
            if not self.scheduler.has_requests() and not self._flying:
                return
            yield self.step()
        raise AssertionError(f"not done after {most} steps: {len(self.scheduler.requests)} requests left")

    def _model(self, output: Any) -> ModelRunnerOutput:
        """A token for each request of which everything known was computed in this batch."""
        for new in output.scheduled_new_reqs:
            self._position[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        self._position.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for resumed in cached.resumed_req_ids:  # the worker reads all of its tokens there, or dies
            assert list(self.requests[resumed].all_token_ids) == list(cached.all_token_ids[resumed])
        ids, tokens = [], []
        for request_id, number in output.num_scheduled_tokens.items():
            end = self._position[request_id] + number
            ids.append(request_id)
            tokens.append([token(request_id, end)] if end >= self.requests[request_id].num_tokens else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _land(self) -> None:
        for outputs in self.scheduler.update_from_output(*self._flying.popleft()).values():
            for output in outputs.outputs:
                self.got[output.request_id] += output.new_token_ids

    # -- what must be true --

    @property
    def held(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - type(pool).get_num_free_blocks(pool))

    def check_finished(self) -> None:
        """Every request has exactly its tokens, an aborted one the first of them, and the pool is free."""
        for request_id, job in self.jobs.items():
            expected, got = job.expected(request_id), self.got[request_id]
            assert expected[: len(got)] == got, f"{request_id} got other tokens"
            assert request_id in self.aborted or len(expected) == len(got), f"{request_id}: {len(got)} of {job.answer}"
        assert 0 == self.held
        assert not self.scheduler.requests


def some_job(chance: random.Random) -> dict[str, int]:
    return {"prompt": chance.randint(5, 60), "answer": chance.randint(20, 120)}
