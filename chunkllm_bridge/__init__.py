"""The face of ChunkLLM Bridge: all that a plugin author imports."""

from chunkllm_bridge.common.abi import (
    ABI,
    AttentionPlan,
    AttentionStep,
    BatchingPlan,
    BatchingStep,
    BlocksPlan,
    BlocksStep,
    DraftsPlan,
    DraftsStep,
    EngineInfo,
    KVLayout,
    Model,
    Outcome,
    Plugin,
    PluginSpec,
    Preparation,
    Seam,
    WeightsPlan,
    WeightsStep,
)

__version__ = "0.1.0"

__all__ = [
    "ABI",
    "AttentionPlan",
    "AttentionStep",
    "BatchingPlan",
    "BatchingStep",
    "BlocksPlan",
    "BlocksStep",
    "DraftsPlan",
    "DraftsStep",
    "EngineInfo",
    "KVLayout",
    "Model",
    "Outcome",
    "Plugin",
    "PluginSpec",
    "Preparation",
    "Seam",
    "WeightsPlan",
    "WeightsStep",
]
