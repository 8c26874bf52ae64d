"""What we wrap or lean on in SGLang (read in 0.5.23; seen unchanged by name from 0.5.22)."""

from __future__ import annotations

from chunkllm_bridge.patches import Patch

# ---- the process that launches ---------------------------------------------------------------------------------------

ADD_CLI_ARGS = Patch(
    target="sglang.srt.server_args:ServerArgs.add_cli_args",
    parameters=("parser",),
    fingerprints=("2ade2c12b391",),
    capability="launch",
    why="general plugins have no hook for launch flags",
    remove_when="general plugins get a hook for the argument parser",
)
FROM_CLI_ARGS = Patch(
    target="sglang.srt.server_args:ServerArgs.from_cli_args",
    parameters=("args",),
    fingerprints=("8e4a5631cf3e",),
    capability="launch",
    why="flags that are no ServerArgs fields are dropped here without a word",
    remove_when="general plugins get a hook for the argument parser",
)
LAUNCH = Patch(
    target="sglang.srt.entrypoints.engine:Engine._launch_subprocesses",
    parameters=("server_args",),
    fingerprints=("ef2800c025d5",),
    capability="launch",
    why="the one place that every entry path passes before it spawns (launch_server, serve, Engine); SGLang swallows "
    "what a plugin raises, so whether the bridge is in every scheduler is checked here, before anybody is served",
    remove_when="SGLang ends a launch whose plugin failed",
)
DP_INIT_INFO = Patch(
    target="sglang.srt.managers.data_parallel_controller:DataParallelController.get_init_info",
    parameters=(),
    fingerprints=("adb75a4f33bb",),
    capability="launch",
    why="the controller keeps to itself what its schedulers said of themselves",
    remove_when="it hands on the schedulers' own words",
)
SERVE = Patch(
    target="sglang.srt.entrypoints.http_server:_setup_and_run_http_server",
    parameters=("server_args", "tokenizer_manager"),
    fingerprints=("3842818bcee6",),
    capability="control",
    why="here the HTTP server of one engine begins and ends: our routes, the token and the metrics live as long",
    remove_when="general plugins can add routes",
)
DISPATCH = Patch(
    target="sglang.srt.managers.tokenizer_manager:TokenizerManager._dispatch_to_scheduler",
    parameters=("obj",),
    fingerprints=("4316cc4f3c14",),
    capability="control",
    wraps=False,
    why="carries a command to the scheduler of every replica, between two steps",
    remove_when="plugins can send messages of their own",
)
DP_FORWARD = Patch(
    target="sglang.srt.managers.data_parallel_controller:DataParallelController.send_control_message",
    parameters=("obj",),
    fingerprints=("ed8aa0813bb3",),
    capability="control",
    wraps=False,
    why="hands messages that it does not know to all replicas",
    remove_when="plugins can send messages of their own",
)
HANDLE_LOOP = Patch(
    target="sglang.srt.managers.tokenizer_manager:TokenizerManager.handle_loop",
    parameters=(),
    fingerprints=("0784957991a5",),
    capability="control",
    wraps=False,
    why="hands our answers to the dispatcher, and batch outputs to the method that is timed",
    remove_when="plugins can send messages of their own",
)
AUTH_LEVEL = Patch(
    target="sglang.srt.utils.auth:_get_auth_level_from_app_and_scope",
    parameters=("app", "scope"),
    fingerprints=("88695f73e629",),
    capability="control",
    wraps=False,
    why="an admin key guards our routes only where their endpoints are marked the way that this reads",
    remove_when="general plugins can add routes",
)
BATCH_OUTPUT = Patch(
    target="sglang.srt.managers.tokenizer_manager:TokenizerManager._handle_batch_output",
    parameters=("recv_obj",),
    fingerprints=("14da48478730",),
    capability="metrics",
    why="inter-token latencies are only known here, and the engine measures them only with --enable-metrics",
    remove_when="latencies can be observed without the engine's own metrics",
)

LAUNCHER = (
    *(ADD_CLI_ARGS, FROM_CLI_ARGS, LAUNCH, DP_INIT_INFO),
    *(SERVE, DISPATCH, DP_FORWARD, HANDLE_LOOP, AUTH_LEVEL, BATCH_OUTPUT),
)

# ---- a scheduler process -------------------------------------------------------------------------------------------

INIT_POOL = Patch(
    target="sglang.srt.managers.scheduler:Scheduler.init_target_memory_pool",
    parameters=(),
    fingerprints=("f5400245f6ab",),
    capability="attach",
    why="the moment in a scheduler at which its model is loaded and no KV pool is sized yet",
    remove_when="the scheduler offers a plugin hook before its pools",
)
INIT_INFO = Patch(
    target="sglang.srt.managers.scheduler:Scheduler.get_init_info",
    parameters=(),
    fingerprints=("066f424a7fd1",),
    capability="attach",
    why="the moment at which a scheduler is complete, and the way to say what it attached before anybody is served",
    remove_when="SGLang reports what each plugin did in each process",
)
RELEASE = Patch(
    target="sglang.srt.managers.scheduler:Scheduler.release_host_resources",
    parameters=(),
    fingerprints=("3f6a1a7df235",),
    capability="attach",
    why="plugins are promised a close at the end, and nothing else of a scheduler knows when that is",
    remove_when="the scheduler offers a plugin hook at its end",
)
PROFILE_BYTES = Patch(
    target="sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
    parameters=("pre_model_load_memory",),
    fingerprints=("b4514d2a80e9",),
    capability="kv.quota",
    why="kv_cache.memory_ratio caps the pool in bytes, and the engine's own option counts tokens of one dtype",
    remove_when="the pool can be capped in bytes",
)
POOL_CONFIG = Patch(
    target="sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._resolve_memory_pool_config",
    parameters=("pre_model_load_memory",),
    fingerprints=("488c0a6cafca",),
    capability="kv.quota",
    why="a pool that breaks the spec is refused before it is allocated",
    remove_when="the scheduler offers a plugin hook before its pools",
)
GET_NEXT_BATCH = Patch(
    target="sglang.srt.managers.scheduler:Scheduler.get_next_batch_to_run",
    parameters=("running_batch", "last_batch"),
    fingerprints=("b040e3db615e",),
    capability="kv.quota",
    why="a step begins and ends here, in the normal and in the overlapping loop",
    remove_when="the scheduler offers a step hook",
)
GET_NEW_PREFILL = Patch(
    target="sglang.srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
    parameters=("running_batch",),
    fingerprints=("2eb02378cd28",),
    capability="batch.window",
    why="new requests are hidden here while a window holds them, and one may go alone where a quota is below a request",
    remove_when="admission is a seam that a plugin can subclass without replacing it",
)
UPDATE_RUNNING = Patch(
    target="sglang.srt.managers.scheduler:Scheduler.update_running_batch",
    parameters=("batch",),
    fingerprints=("0176fb9c1a6e",),
    capability="kv.quota",
    why="the requests that a lowered quota sends back are counted here",
    remove_when="the scheduler says whom it retracted and why",
)
POLL_ABORTS = Patch(
    target="sglang.srt.managers.scheduler:Scheduler._poll_timeout_aborts",
    parameters=(),
    fingerprints=("e48c51310aff",),
    capability="kv.quota",
    why="what the first rank alone decides has to reach all ranks in one place of the order of requests",
    remove_when="a plugin can send a message of its own with the requests",
)
CREATE_PREFILL_BUDGET = Patch(
    target="sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.create_prefill_budget",
    parameters=("tree_cache", "num_mixed_decode_tokens"),
    fingerprints=("1fbf15d207e6",),
    capability="kv.quota",
    why="what may be admitted: the reserve is charged like tokens that are promised already",
    remove_when="the allocator takes a limit",
)
CHECK_DECODE_CAPACITY = Patch(
    target="sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.check_decode_capacity",
    parameters=("num_tokens", "tree_cache", "requests"),
    fingerprints=("5075798dafab",),
    capability="kv.quota",
    why="what running requests may grow by; the engine's retraction converges on this very answer",
    remove_when="the allocator takes a limit",
)
RETRACTION = Patch(
    target="sglang.srt.managers.schedule_batch:ScheduleBatch.release_req",
    parameters=("idx", "remaing_req_count"),
    fingerprints=("90b706a60111",),
    capability="kv.quota",
    wraps=False,
    why="requests give way to a prompt that was begun the way that the engine retracts them",
    remove_when="the engine holds back the rest of a prompt that does not fit",
)
RETRACTION_ORDER = Patch(
    target="sglang.srt.managers.schedule_batch:ScheduleBatch._get_decode_retraction_order",
    parameters=("reqs",),
    fingerprints=("bc3b7f14642e",),
    capability="kv.quota",
    wraps=False,
    why="the victim is the one that the engine would choose",
    remove_when="the engine holds back the rest of a prompt that does not fit",
)

SCHEDULER = (
    *(INIT_POOL, INIT_INFO, RELEASE, PROFILE_BYTES, POOL_CONFIG, GET_NEXT_BATCH, GET_NEW_PREFILL, UPDATE_RUNNING),
    *(POLL_ABORTS, CREATE_PREFILL_BUDGET, CHECK_DECODE_CAPACITY, RETRACTION, RETRACTION_ORDER),
)

# ---- speculation, in a scheduler process ---------------------------------------------------------------------------

ROW_WIDTH = Patch(
    target="sglang.srt.mem_cache.kv_cache_configurator:get_req_to_token_extra_context_len",
    parameters=(),
    fingerprints=("c824be5d6bec",),
    capability="spec.chain",
    why="a request's row is too short for the slots that two steps reserve at the end of its context",
    remove_when="rows are as long as what the allocator reserves, at every page size",
)
REGISTER_ALGORITHM = Patch(
    target="sglang.srt.speculative.spec_registry:register_algorithm",
    parameters=("name", "supports_overlap", "spec_class"),
    fingerprints=("646c2da77bf3",),
    capability="spec.chain",
    wraps=False,
    why="registers our algorithm, with the methods that its own class for such algorithms lacks",
    remove_when="registered algorithms have all methods that the scheduler calls",
)
FORWARD_GENERATION = Patch(
    target="sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
    parameters=("batch", "is_verify", "capture_hidden_mode"),
    fingerprints=("60e078facd86",),
    capability="spec.chain",
    wraps=False,
    why="runs a prefill, a decode and a verification, and gives their hidden states",
    remove_when="workers of plugins have a documented contract",
)
RUN_BATCH = Patch(
    target="sglang.srt.managers.scheduler:Scheduler.run_batch",
    parameters=("batch",),
    fingerprints=("45986b0d3c72",),
    capability="spec.chain",
    wraps=False,
    why="puts back what a worker changes of a batch, and relays what requests carry to their next step",
    remove_when="workers of plugins have a documented contract",
)
RESERVE_SLOTS = Patch(
    target="sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode",
    parameters=("batch",),
    fingerprints=("aedbb8cee2b3",),
    capability="spec.chain",
    wraps=False,
    why="reserves the slots in which drafts are verified",
    remove_when="workers of plugins have a documented contract",
)
READ_RESULT = Patch(
    target="sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    parameters=("result", "batch"),
    fingerprints=("c2ed08738e6b",),
    capability="spec.chain",
    wraps=False,
    why="says in the order of the steps what was accepted, and reads a result by its own stride",
    remove_when="workers of plugins have a documented contract",
)
GRAMMAR_MASK = Patch(
    target="sglang.srt.speculative.spec_utils:build_grammar_vocab_mask",
    parameters=("reqs", "tree", "sampling_info", "device", "barrier"),
    fingerprints=("eec2f0f01d5f",),
    capability="spec.chain",
    wraps=False,
    why="leads the requests' grammars along the drafts and back",
    remove_when="workers of plugins have a documented contract",
)
SAMPLER = Patch(
    target="sglang.srt.layers.sampler:Sampler.forward",
    parameters=("logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs"),
    fingerprints=("72bc8fcb6217",),
    capability="spec.chain",
    wraps=False,
    why="chooses the model's own token at every verified row",
    remove_when="workers of plugins have a documented contract",
)

SPECULATION = (
    *(ROW_WIDTH, REGISTER_ALGORITHM, FORWARD_GENERATION, RUN_BATCH, RESERVE_SLOTS, READ_RESULT, GRAMMAR_MASK, SAMPLER),
)

PATCHES = (*LAUNCHER, *SCHEDULER, *SPECULATION)
