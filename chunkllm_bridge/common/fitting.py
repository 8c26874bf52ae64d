"""Whether drafts can be verified: shape, type and place of a plan's tensors, and the shape of its tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from chunkllm_bridge.common.abi import DraftsPlan, DraftsStep

if TYPE_CHECKING:
    import torch

SOURCE = re.compile(r"[a-z][a-z0-9_]{0,31}")
INTEGERS = ("torch.int64", "torch.int32", "torch.int16", "torch.int8", "torch.uint8")


@attrs.frozen
class Drafts:
    """What is to be verified next."""

    tokens: torch.Tensor  # (num_requests, width) int64; a chain ends before its first negative one
    parents: tuple[int, ...] | None = None  # None: chains. Of a tree, negative nodes are not there


@attrs.frozen
class Misfit:
    """Why a plan cannot be used; `kind` as the guard counts it."""

    kind: str  # "malformed" or "rejected"
    reason: str


def fit(plan: DraftsPlan, step: DraftsStep, vocab_size: int) -> Drafts | Misfit:
    """The plan's drafts, ended where a token is none of the vocabulary (0: of unknown size). No device sync."""
    tokens = plan.tokens
    if type(tokens) is not type(step.last_tokens):  # no subclass: its methods would be plugin code
        return Misfit("malformed", f"tokens are a {type(tokens).__name__}, not a tensor")
    if (found := str(tokens.dtype)) not in INTEGERS:
        return Misfit("malformed", f"tokens are {found.removeprefix('torch.')}, not int64")
    shape, rows = tuple(tokens.shape), len(step.request_ids)
    if plan.sources is not None and (misfit := _sources_misfit(plan.sources, rows)):
        return misfit
    if len(shape) != 2 or shape[0] != rows:
        return Misfit("malformed", f"tokens have the shape {shape}, not ({rows}, width)")
    if tokens.device != step.last_tokens.device:
        return Misfit("malformed", f"tokens are on {tokens.device}, the step on {step.last_tokens.device}")
    width, parents = shape[1], plan.parents
    if parents is not None:
        if misfit := _tree_misfit(parents, width, step):
            return misfit
        if parents == tuple(range(-1, width - 1)):
            parents = None
    elif width > step.max_tokens:
        return Misfit("rejected", f"{width} draft tokens, {step.max_tokens} allowed")
    tokens = tokens.long()
    if tokens.device.type == "cpu" and rows and width:  # a look is no device sync there, and is cheaper than the rest
        low, high = tokens.aminmax()
        if low >= 0 and (not vocab_size or high < vocab_size):
            return Drafts(tokens.clone(), parents)  # the adapter may write into it, and it may be a view of the step
    bad = tokens < 0
    if vocab_size:
        bad = bad | (tokens >= vocab_size)
    if parents is None:
        bad = bad.cumsum(1) > 0
    else:
        bad = bad.clone()
        for level in levels(parents)[1:]:
            bad[:, level] |= bad[:, [parents[node] for node in level]]
    return Drafts(tokens.masked_fill(bad, -1), parents)


def levels(parents: Sequence[int]) -> list[list[int]]:
    """The nodes of a tree by their depth, the root's children first. Each parent stands before its children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return [
        [node for node, depth in enumerate(depths) if depth == level] for level in range(max(depths, default=-1) + 1)
    ]


def _sources_misfit(sources: object, rows: int) -> Misfit | None:
    if type(sources) is not tuple or len(sources) != rows:
        return Misfit("malformed", f"sources are not a tuple of {rows}, one per request")
    for source in sources:
        if type(source) is not str:  # its repr would be plugin code
            return Misfit("malformed", f"a source is a {type(source).__name__}, not a name")
        if not SOURCE.fullmatch(source):
            return Misfit("malformed", f"the source {source[:33]!r} is no name: small letters, digits and _")
    return None


def _tree_misfit(parents: object, width: int, step: DraftsStep) -> Misfit | None:
    if type(parents) is not tuple or any(type(parent) is not int for parent in parents):
        return Misfit("malformed", "parents are not a tuple of whole numbers")
    if len(parents) != width:
        return Misfit("malformed", f"{len(parents)} parents for {width} nodes")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            return Misfit("malformed", f"the parent of node {node} is {parent}, which does not stand before it")
    if width > step.max_nodes:
        return Misfit("rejected", f"a tree of {width} nodes, {step.max_nodes} allowed")
    if (depth := len(levels(parents))) > step.max_tokens:
        return Misfit("rejected", f"a tree of depth {depth}, {step.max_tokens} allowed")
    if step.max_nodes == step.max_tokens and parents != tuple(range(-1, width - 1)):
        return Misfit("rejected", "a tree, and this engine verifies chains")
    return None
