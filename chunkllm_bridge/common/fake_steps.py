"""Steps to ask any plugin with: ordinary ones, and the odd ones that an engine meets sooner or later."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chunkllm_bridge.common.abi import AttentionStep, BatchingStep, BlocksStep, DraftsStep, Seam, Step, WeightsStep
from chunkllm_bridge.common.fake import HIDDEN
from chunkllm_bridge.common.fake_workers import tensor


def _blocks() -> list[Step]:
    rows = [(24, 10, 2, 1), (24, 0, 0, 0), (24, 24, 8, 5), (1, 0, 0, 1), (1, 1, 1, 0)]  # total, held, running, waiting
    return [
        BlocksStep(index=index, total=total, held=held, available=total - held, running=running, waiting=waiting)
        for index, (total, held, running, waiting) in enumerate(rows)
    ]


def _batching() -> list[Step]:
    rows = [(1, 0, 8, 5, 0.0, True), (8, 0, 8, 40, 0.004, True), (1, 8, 0, 5, 0.1, True), (1, 0, 8, 99, 60.0, False)]
    return [
        BatchingStep(
            index=index,
            new_waiting=new,
            running=running,
            slots=slots,
            waiting_tokens=tokens,
            budget_tokens=64,
            oldest_wait=wait,
            arrivals_possible=arrivals,
        )
        for index, (new, running, slots, tokens, wait, arrivals) in enumerate(rows)
    ]


def _attention() -> list[Step]:
    return [
        AttentionStep(
            index=requests,
            num_requests=requests,
            num_tokens=requests,
            decode_only=True,
            query_start_loc=tensor(range(requests + 1), "int32"),
            seq_lens=tensor([1] * requests, "int32"),
            block_table=tensor([[0]] * requests, "int32"),
        )
        for requests in (2, 0, 1)
    ]


def _drafts() -> list[Step]:
    return [
        DraftsStep(
            index=requests,
            request_ids=tuple(f"r{number}" for number in range(requests)),
            hidden_states=tensor([[0.5] * HIDDEN] * requests, "float32"),
            last_tokens=tensor([1] * requests, "int64"),
            max_tokens=most,
            max_nodes=nodes,
            **({"context": lambda place, first: [3, 1, 2, 1][first:]} if most == 4 else {}),
        )
        for requests, most, nodes in ((2, 4, 4), (0, 4, 4), (1, 1, 1), (3, 4, 16), (2, 2, 64))
    ]


def _weights() -> list[Step]:
    shapes = ((8, 8), (1, 8), (8, 1))
    return [
        WeightsStep(layer=f"model.layers.{index}.mlp.down_proj", weight=tensor([[0.5] * wide] * high, "float32"))
        for index, (high, wide) in enumerate(shapes)
    ]


ODD_STEPS: Mapping[Seam, Callable[[], list[Step]]] = {
    Seam.BLOCKS: _blocks,
    Seam.BATCHING: _batching,
    Seam.ATTENTION: _attention,
    Seam.DRAFTS: _drafts,
    Seam.WEIGHTS: _weights,
}
