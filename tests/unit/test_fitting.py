"""Which drafts can be verified."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from chunkllm_bridge import DraftsPlan, DraftsStep
from chunkllm_bridge.common.fitting import Drafts, Misfit, fit, levels

STEP = DraftsStep(
    index=1,
    request_ids=("a", "b"),
    hidden_states=torch.zeros(2, 8),
    last_tokens=torch.tensor([5, 6]),
    max_tokens=3,
    max_nodes=6,
)
CHAINS = attrs.evolve(STEP, max_nodes=3)
VOCAB = 100


def rows(*tokens: list[int], **more: Any) -> torch.Tensor:
    return torch.tensor(tokens, **more)


def fitted(plan: DraftsPlan, step: DraftsStep = STEP) -> tuple[list[list[int]], tuple[int, ...] | None]:
    drafts = fit(plan, step, VOCAB)
    assert isinstance(drafts, Drafts), drafts
    assert torch.int64 == drafts.tokens.dtype
    return drafts.tokens.tolist(), drafts.parents


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_a_chain_passes_through(kind: Any) -> None:
    assert ([[1, 2, 3], [4, 5, 6]], None) == fitted(DraftsPlan(tokens=rows([1, 2, 3], [4, 5, 6], dtype=kind)))


def test_a_row_ends_at_its_first_token_that_is_none() -> None:
    """A negative one, or one beyond the vocabulary; what stands behind it is nothing either."""
    plan = DraftsPlan(tokens=rows([1, -1, 3], [VOCAB - 1, 7, VOCAB]))

    assert ([[1, -1, -1], [99, 7, -1]], None) == fitted(plan)


def test_a_vocabulary_of_unknown_size_has_no_end() -> None:
    drafts = fit(DraftsPlan(tokens=rows([10**9], [1])), STEP, 0)

    assert isinstance(drafts, Drafts)
    assert [[10**9], [1]] == drafts.tokens.tolist()


def test_a_tree_passes_through() -> None:
    """Below a node that is none there is nothing."""
    parents = (-1, -1, 0, 0, 2)
    plan = DraftsPlan(tokens=rows([1, 2, 3, 4, 5], [1, 2, VOCAB, 4, 5]), parents=parents)

    assert ([[1, 2, 3, 4, 5], [1, 2, -1, 4, -1]], parents) == fitted(plan)


def test_a_tree_that_is_a_chain_is_one() -> None:
    """So that every engine can verify it."""
    plan = DraftsPlan(tokens=rows([1, 2], [3, 4]), parents=(-1, 0))

    assert ([[1, 2], [3, 4]], None) == fitted(plan) == fitted(plan, CHAINS)


def test_drafts_are_the_adapter_s_own() -> None:
    """A plan may be a view of what the engine lent; whoever writes into the drafts does not write there."""
    drafts = fit(DraftsPlan(tokens=STEP.last_tokens[:, None]), STEP, VOCAB)
    assert isinstance(drafts, Drafts)
    drafts.tokens[0] = -1

    assert [5, 6] == STEP.last_tokens.tolist()


def test_nobody_drafts() -> None:
    """No column, and no request."""
    assert ([[], []], None) == fitted(DraftsPlan(tokens=torch.zeros(2, 0, dtype=torch.int64)))
    nobody = attrs.evolve(STEP, request_ids=(), last_tokens=torch.tensor([], dtype=torch.int64))
    assert ([], None) == fitted(DraftsPlan(tokens=torch.zeros(0, 3, dtype=torch.int64)), nobody)


class Larger(torch.Tensor):
    """Code of the plugin's own in a plan."""


@pytest.mark.parametrize(
    ("tokens", "parents", "step", "misfit"),
    [
        ([[1], [2]], None, STEP, "malformed: tokens are a list, not a tensor"),
        (rows([1], [2]).as_subclass(Larger), None, STEP, "malformed: tokens are a Larger, not a tensor"),
        (rows([1.0], [2.0]), None, STEP, "malformed: tokens are float32, not int64"),
        (rows([True], [False]), None, STEP, "malformed: tokens are bool, not int64"),
        (rows([1, 2, 3]), None, STEP, "malformed: tokens have the shape (1, 3), not (2, width)"),
        (torch.tensor([1, 2]), None, STEP, "malformed: tokens have the shape (2,), not (2, width)"),
        (rows([1], [2]).to("meta"), None, STEP, "malformed: tokens are on meta, the step on cpu"),
        (rows([1] * 4, [2] * 4), None, STEP, "rejected: 4 draft tokens, 3 allowed"),
        (rows([1, 2], [3, 4]), [-1, 0], STEP, "malformed: parents are not a tuple of whole numbers"),
        (rows([1, 2], [3, 4]), (-1, 0.0), STEP, "malformed: parents are not a tuple of whole numbers"),
        (rows([1, 2], [3, 4]), (-1,), STEP, "malformed: 1 parents for 2 nodes"),
        (rows([1, 2], [3, 4]), (1, -1), STEP, "malformed: the parent of node 0 is 1, which does not stand before it"),
        (rows([1, 2], [3, 4]), (-1, 1), STEP, "malformed: the parent of node 1 is 1, which does not stand before it"),
        (rows([1, 2], [3, 4]), (-1, -2), STEP, "malformed: the parent of node 1 is -2, which does not stand before it"),
        (rows([1] * 7, [1] * 7), (-1,) * 7, STEP, "rejected: a tree of 7 nodes, 6 allowed"),
        (rows([1] * 4, [1] * 4), (-1, 0, 1, 2), STEP, "rejected: a tree of depth 4, 3 allowed"),
        (rows([1, 2], [3, 4]), (-1, -1), CHAINS, "rejected: a tree, and this engine verifies chains"),
    ],
)
def test_what_cannot_be_verified_says_why(tokens: Any, parents: Any, step: DraftsStep, misfit: str) -> None:
    found = fit(DraftsPlan(tokens=tokens, parents=parents), step, VOCAB)

    assert isinstance(found, Misfit)
    assert misfit == f"{found.kind}: {found.reason}"


@pytest.mark.parametrize("sources", [None, ("text", "heads"), ("a" * 32, "n_gram2")])
def test_sources_are_names(sources: Any) -> None:
    """One per request, or none at all; the drafts are as without."""
    assert ([[1], [2]], None) == fitted(DraftsPlan(tokens=rows([1], [2]), sources=sources))


class Name(str):
    """Code of the plugin's own in a name."""


class Loud:
    def __repr__(self) -> str:
        raise RuntimeError("this is plugin code")


@pytest.mark.parametrize(
    ("sources", "misfit"),
    [
        ((), "sources are not a tuple of 2, one per request"),
        (("text",), "sources are not a tuple of 2, one per request"),
        (("text",) * 3, "sources are not a tuple of 2, one per request"),
        (["text", "text"], "sources are not a tuple of 2, one per request"),
        ("ab", "sources are not a tuple of 2, one per request"),
        (("text", "Text"), "the source 'Text' is no name: small letters, digits and _"),
        (("", "text"), "the source '' is no name: small letters, digits and _"),
        (("text\n", "text"), "the source 'text\\n' is no name: small letters, digits and _"),
        (("text", "a" * 33), f"the source '{'a' * 33}' is no name: small letters, digits and _"),
        (("a" * 10**6, "text"), f"the source '{'a' * 33}' is no name: small letters, digits and _"),
        (("text", None), "a source is a NoneType, not a name"),
        (("text", Name("text")), "a source is a Name, not a name"),
        (("text", Loud()), "a source is a Loud, not a name"),
    ],
)
def test_sources_that_are_no_names_say_why(sources: Any, misfit: str) -> None:
    """They become label values; what a plugin made of them is not called."""
    found = fit(DraftsPlan(tokens=rows([1], [2]), sources=sources), STEP, VOCAB)

    assert Misfit("malformed", misfit) == found


def test_levels_are_by_depth() -> None:
    assert [[0, 2], [1, 3], [4]] == levels((-1, 0, -1, 0, 3))
    assert [] == levels(())
