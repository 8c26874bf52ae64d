"""What we wrap or lean on in vLLM (read in 0.32.0; seen unchanged by name from 0.28 to 0.33)."""

from __future__ import annotations

from chunkllm_bridge.patches import Patch

ADD_CLI_ARGS = Patch(
    target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
    parameters=("parser",),
    fingerprints=("6e3e312d2aaf",),
    capability="launch",
    why="only a platform plugin may add launch flags, and a platform plugin replaces the platform",
    remove_when="general plugins get a hook for the argument parser",
)
FROM_CLI_ARGS = Patch(
    target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
    parameters=("args",),
    fingerprints=("9291dd148c37",),
    capability="launch",
    why="flags that are no EngineArgs fields are dropped here without a word",
    remove_when="general plugins get a hook for the argument parser",
)
CREATE_ENGINE_CONFIG = Patch(
    target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
    parameters=(),
    fingerprints=("2b72484f1905",),
    capability="launch",
    why="the one place that every entry path passes with a resolved config (serve, bench, LLM, AsyncLLM)",
    remove_when="plugins can post-process VllmConfig",
)
INITIALIZE_KV_CACHES = Patch(
    target="vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    parameters=("vllm_config",),
    fingerprints=("53a7dcba9834",),
    capability="attach",
    why="the first moment in EngineCore at which all workers answer and no KV pool is sized yet",
    remove_when="EngineCore offers a plugin hook with its executor",
)
SHUTDOWN = Patch(
    target="vllm.v1.engine.core:EngineCore.shutdown",
    parameters=(),
    fingerprints=("ed5c9670c8dc",),
    capability="attach",
    why="plugins are promised a close at the end, and nothing else of an engine knows when that is",
    remove_when="EngineCore offers a plugin hook with its executor",
)
GET_SCHEDULER_CLS = Patch(
    target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
    parameters=(),
    fingerprints=("10ad3f3368ae",),
    capability="attach",
    why="a scheduler subclass would have to pick sync or async itself; we wrap the instance of the engine's own choice",
    remove_when="EngineCore offers a plugin hook with its scheduler",
)
SCHEDULE = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
    parameters=(),
    fingerprints=("028689af1930",),
    capability="kv.quota",
    why="quotas and batch windows are decided once per step, before it is scheduled",
    remove_when="the scheduler takes policies",
)
ADD_REQUEST = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler.add_request",
    parameters=("request",),
    fingerprints=("47c373848dd2",),
    capability="batch.window",
    why="a window is counted from the arrival in the scheduler; the request's own time is another process's clock",
    remove_when="requests carry a monotonic arrival time",
)
ALLOCATE_SLOTS = Patch(
    target="vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    parameters=("request", "num_new_tokens"),
    fingerprints=("af6470ef0223",),
    capability="kv.quota",
    why="the only way to blocks; None makes the scheduler wait or preempt by its own rules",
    remove_when="the KV cache manager takes a limit",
)
GET_NUM_FREE_BLOCKS = Patch(
    target="vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
    parameters=(),
    fingerprints=("212a17e8edbe",),
    capability="kv.quota",
    why="both admission checks of allocate_slots read it; it is lowered only while allocate_slots runs",
    remove_when="the KV cache manager takes a limit",
)
PREEMPT_REQUEST = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
    parameters=("request", "timestamp", "drop_stale_output"),
    fingerprints=("957d19074c3d",),
    capability="kv.quota",
    wraps=False,
    why="a quota lowered below what is held preempts by the scheduler's own recipe (as reset_prefix_cache does)",
    remove_when="the scheduler offers preemption as a public call",
)
BLOCKS_CAN_BE_FREED = Patch(
    target="vllm.v1.core.sched.scheduler:Scheduler._request_blocks_can_be_freed",
    parameters=("request",),
    fingerprints=("cf786fb5fd8a",),
    capability="kv.quota",
    wraps=False,
    why="a deferred free gives nothing back in this step",
    remove_when="the scheduler offers preemption as a public call",
)
PROPOSE = Patch(
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    parameters=("scheduler_output", "sampled_token_ids", "sample_hidden_states", "spec_decode_metadata"),
    fingerprints=("5a5d20a973b9",),
    capability="spec.chain",
    why="a custom proposer is given tokens, and no hidden states",
    remove_when="custom proposers get the hidden states and what was verified",
)
INPUT_FITS = Patch(
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter",
    parameters=("common_attn_metadata",),
    fingerprints=("218aad75ac25",),
    capability="spec.chain",
    why="when one request nears the end of its context, the token 0 is drafted for the whole batch",
    remove_when="drafts are cut request by request",
)
REQUEST_REMOVED = Patch(
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._on_request_state_removed",
    parameters=("req_id",),
    fingerprints=("e7c107a357a1",),
    capability="spec.chain",
    why="a custom proposer does not hear that a request is over",
    remove_when="custom proposers hear of the end of requests",
)
SAMPLE = Patch(
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    parameters=("logits", "spec_decode_metadata"),
    fingerprints=("df64e9c9f60e",),
    capability="spec.chain",
    why="a step without drafts goes through the rejection sampler too, and on CPUs top_k then ends the engine",
    remove_when="a step without drafts is sampled as without speculation",
)
WORKER_SHUTDOWN = Patch(
    target="vllm.v1.worker.gpu_worker:Worker.shutdown",
    parameters=(),
    fingerprints=("21c2010aaf27",),
    capability="attach",
    why="plugins in a worker are promised a close at the end",
    remove_when="workers offer a plugin hook",
)
POST_STEP = Patch(
    target="vllm.v1.engine.core:EngineCore.post_step",
    parameters=("model_executed",),
    fingerprints=("baf79af7816b",),
    capability="spec.chain",
    wraps=False,
    why="it asks the workers for drafts in every step; `check_for_draft_tokens` spares that while speculation is off",
    remove_when="speculation can be switched off while serving",
)
EXPAND = Patch(
    target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    parameters=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    fingerprints=("b4708fb306d4",),
    capability="spec.chain",
    why="on CPUs its kernel fills a copy, so drafts are sampled at a temperature that lay in memory by chance",
    remove_when="cpu_triton_utils._expand_kernel_impl writes its result back",
)
ENDPOINT_STATE = Patch(
    target="vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state",
    parameters=("engine_client", "state", "args"),
    fingerprints=("434c3a3b7966",),
    capability="control",
    wraps=False,
    why="control routes are an endpoint plugin",
    remove_when="never: it is the public seam",
)
UTILITY = Patch(
    target="vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async",
    parameters=("method",),
    fingerprints=("27e805160171",),
    capability="control",
    wraps=False,
    why="carries a command to every EngineCore, between two steps",
    remove_when="the engine protocol offers calls into EngineCore",
)
STAT_LOGGERS = Patch(
    target="vllm.v1.metrics.loggers:StatLoggerManager.record",
    parameters=("scheduler_stats", "iteration_stats", "engine_idx"),
    fingerprints=("3bf1d8378d84",),
    capability="metrics",
    wraps=False,
    why="inter-token latencies are only known here; an entry point would switch statistics on for everybody",
    remove_when="stat-logger plugins can be added per launch",
)

PATCHES = (
    *(ADD_CLI_ARGS, FROM_CLI_ARGS, CREATE_ENGINE_CONFIG, INITIALIZE_KV_CACHES, SHUTDOWN, GET_SCHEDULER_CLS),
    *(SCHEDULE, ADD_REQUEST, ALLOCATE_SLOTS, GET_NUM_FREE_BLOCKS, PREEMPT_REQUEST, BLOCKS_CAN_BE_FREED),
    *(PROPOSE, INPUT_FITS, REQUEST_REMOVED, SAMPLE, EXPAND, POST_STEP, WORKER_SHUTDOWN),
    *(ENDPOINT_STATE, UTILITY, STAT_LOGGERS),
)
