"""The speculative algorithm that SGLang is launched with where a spec names a drafting plugin.

SGLang asks for it by name in the process that launches (its arguments are resolved there), in a data-parallel
controller and in every scheduler, so each of them registers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chunkllm_bridge.common import launching
from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.profiles import this_machine
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.spec import Spec

NAME = "CHUNKLLM"

GIVEN: Mapping[str, str] = {
    "speculative_algorithm": "two cannot draft for one engine: leave one of them out",
    "speculative_draft_model_path": "a model that drafts belongs to another algorithm",
    "speculative_num_draft_tokens": "speculative.tokens of the spec says how many",
    "speculative_num_steps": "speculative.tokens of the spec says how many",
    "speculative_eagle_topk": "the plugin says how its drafts branch",
}
"""SGLang's own options that contradict a drafting plugin: field -> why."""

UNFIT: Mapping[str, str] = {
    "enable_lora": "its adapters are applied to one row per request",
    "lora_paths": "its adapters are applied to one row per request",
    "enable_watermark": "SGLang does not know which rows of this algorithm to mark",
    "is_embedding": "it generates no tokens",
    "enable_hisparse": "its slots are bound to one row per request",
    "enable_lmcache": "it does not support speculation",
}
"""Options that speculation does not work with: field -> why."""


def reasons_against(args: object, plugin: str) -> list[str]:
    """Every reason why an engine with these arguments cannot verify this plugin's drafts.

    `args` is a `ServerArgs`, parsed flags or keyword arguments as attributes; what is missing was not given.
    """
    reasons = []
    for field, why in GIVEN.items():
        if (value := getattr(args, field, None)) is not None:
            reasons.append(f"--{field.replace('_', '-')} {value} beside speculative.plugin = {plugin}: {why}")
    for field, why in UNFIT.items():
        if getattr(args, field, None):
            reasons.append(f"--{field.replace('_', '-')} beside speculative.plugin = {plugin}: {why}")
    return reasons


def fields(tokens: int, nodes: int, device: str) -> dict[str, Any]:
    """The launch arguments that make room for so many draft tokens on a path, and per request.

    SGLang captures the CUDA graphs of a verification with the inputs of its built-in algorithms only.
    """
    graphs = {} if device == "cpu" else {"disable_cuda_graph": True}
    return graphs | {
        "speculative_algorithm": NAME,
        "speculative_num_steps": tokens,
        "speculative_num_draft_tokens": nodes + 1,  # and the newest token itself
        "speculative_eagle_topk": 1 if nodes == tokens else 2,
    }


def launched(spec: Spec, args: object) -> dict[str, Any]:
    """The launch arguments that make room for the drafts of a spec's plugin; none where nobody drafts.

    Registers the algorithm in this process. Raises `IncompatibleError` for what cannot go with it: `args` is a
    `ServerArgs`, parsed flags, or keyword arguments as attributes.
    """
    slots = launching.draft_slots(spec, Registry.installed())
    if slots is None:
        return {}
    if reasons := reasons_against(args, spec["speculative.plugin"]):
        raise IncompatibleError("speculation", reasons)
    register()
    return fields(*slots, this_machine().device)


def register() -> None:
    """Make the name known to SGLang in this process. Idempotent."""
    from sglang.srt.speculative import spec_registry
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    if spec_registry.get_spec(NAME) is not None:
        return

    class Algorithm(spec_registry.CustomSpecAlgo):  # type: ignore[misc]  # an engine is Any to us
        """SGLang 0.5.23 calls three methods that its own class for registered algorithms lacks."""

        def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
            from sglang.srt.managers.overlap_utils import FutureMap

            device, *rest = args
            return FutureMap(device, self, *rest, **kwargs)

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def has_draft_kv(self) -> bool:
            return False

        def supports_mixed_chunk(self) -> bool:
            return True

    def factory(server_args: Any) -> type:
        from chunkllm_bridge.sglang.worker import Worker

        return Worker

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(factory)
