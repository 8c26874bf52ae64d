"""What draft heads draft, against the same written out plainly, and the shapes of trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from chunkllm_bridge.heads.base import Folder  # noqa: E402
from chunkllm_bridge.plugins.medusa import formats  # noqa: E402
from chunkllm_bridge.plugins.medusa.heads import NEAR, Heads  # noqa: E402
from chunkllm_bridge.plugins.medusa.tree import Tree  # noqa: E402
from tests.support.heads import write_heads  # noqa: E402
from tests.support.tiny import TinyLlama, make_tiny  # noqa: E402

SHAPE = TinyLlama(vocab=320)
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2), (1, 0, 1))
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models"), SHAPE)


def drawn(rows: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, SHAPE.hidden, generator=random)
    return hidden, torch.randint(0, SHAPE.vocab, (rows,), generator=random)


def made(folder: Path, path: Path, kind: str, candidates: int = 30) -> tuple[Heads, Tensors, Folder]:
    """Loaded heads, their tensors as stored, and the model.

    So few candidates that the first stage loses none, and all of them letters: the tiny model says nothing else.
    """
    assert candidates <= NEAR
    write_heads(path, folder, kind=kind, candidates=candidates, first=ord("A"), gain=1.0)
    base = Folder(folder)
    return formats.load(path, base), formats.read(path)[1], base


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt()


def plain(kind: str, tensors: Tensors, base: Folder, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """(candidates,) logits of the head after `tokens`, the last token and the drafts so far; one row, in float32."""
    head = base.rows("lm_head", tensors["vocabulary"].long())
    depth = len(tokens) - 1
    if kind == "independent":
        moved = tensors["weights"][depth, 0] @ hidden + tensors["biases"][depth, 0]
        return head @ (hidden + torch.nn.functional.silu(moved))
    known = tensors["vocabulary"].tolist()
    state = hidden
    for index, token in enumerate(tokens):
        seen = torch.zeros(2 * SHAPE.hidden)
        if token in known:
            embedding = base.rows("embedding", torch.tensor([token]))[0]
            seen = torch.cat([norm(embedding), norm(tensors["follow"][known.index(token)])])
        both = tensors["states"][index, 0] @ norm(state) + tensors["tokens"][index] @ seen + tensors["biases"][index, 0]
        gate, up = both.chunk(2)
        state = state + tensors["outs"][index, 0] @ (torch.nn.functional.silu(gate) * up)
    return head @ state


@pytest.mark.parametrize("kind", ["independent", "sequential"])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_chain_is_what_the_formulas_say(kind: str, rows: int, folder: Path, tmp_path: Path) -> None:
    """Token by token the best of plain-torch logits, for one row and several."""
    heads, tensors, base = made(folder, tmp_path / "h.safetensors", kind)
    hidden, last = drawn(rows)
    expected = []
    for row in range(rows):
        tokens = [int(last[row])]
        for _ in range(4):
            best = plain(kind, tensors, base, hidden[row], tokens).argmax()
            tokens.append(int(tensors["vocabulary"][best]))
        expected.append(tokens[1:])

    assert expected == heads.chain(hidden, last, 4).tolist()
    assert [tokens[:2] for tokens in expected] == heads.chain(hidden, last, 2).tolist()


@pytest.mark.parametrize("kind", ["independent", "sequential"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_tree_is_what_the_formulas_say(kind: str, rows: int, folder: Path, tmp_path: Path) -> None:
    """Each node is the candidate of its rank; of sequential heads, after the tokens on its own path."""
    heads, tensors, base = made(folder, tmp_path / "h.safetensors", kind)
    hidden, last = drawn(rows)
    tree = Tree.of(PATHS)
    expected = []
    for row in range(rows):
        paths: list[list[int]] = []
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            before = [int(last[row])] if parent < 0 else paths[parent]
            ranked = plain(kind, tensors, base, hidden[row], before).argsort(descending=True)
            paths.append([*before, int(tensors["vocabulary"][ranked[rank]])])
        expected.append([path[-1] for path in paths])

    assert expected == heads.tree(hidden, last, tree).tolist()


@pytest.mark.parametrize("kind", ["independent", "sequential"])
def test_a_chain_is_a_tree_without_branches(kind: str, folder: Path, tmp_path: Path) -> None:
    """Both ways draft the same."""
    heads, _, _ = made(folder, tmp_path / "h.safetensors", kind)
    hidden, last = drawn(6)

    assert heads.chain(hidden, last, 4).tolist() == heads.tree(hidden, last, Tree.chain(4)).tolist()


def test_the_first_stage_finds_the_best(folder: Path, tmp_path: Path) -> None:
    """With all tokens as candidates, a narrow LM head of full rank passes on the best one always."""
    from chunkllm_bridge.heads import nets
    from tests.support.heads import write_own

    base, path = Folder(folder), tmp_path / "h.safetensors"
    tensors = formats.read(write_heads(path, folder, gain=1.0))[1]
    hidden, last = drawn(16)
    random = torch.randn(512, SHAPE.hidden, generator=torch.Generator().manual_seed(1))
    tensors |= nets.short_form(random, base.rows("lm_head"), SHAPE.hidden)
    write_own(path, "sequential", tensors, base)
    heads = formats.load(path, base)
    logits = [plain("sequential", tensors, base, own, [int(token)]) for own, token in zip(hidden, last, strict=True)]

    assert [int(each.argmax()) for each in logits] == heads.chain(hidden, last, 1)[:, 0].tolist()


def test_medusa_choices_become_a_tree() -> None:
    """Nodes by depth, each after its parent."""
    tree = Tree.of(((0, 0), (1,), (0,), (0, 2)))

    assert ((-1, -1, 0, 0), (0, 1, 0, 2), (1, 1, 2, 2)) == (tree.parents, tree.ranks, tree.depths)
    assert (2, 3) == (tree.depth, tree.breadth)
    assert Tree.chain(3) == Tree.of(((0,), (0, 0), (0, 0, 0)))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ((), "there is no path in it"),
        (((0,), (0,)), "(0,) stands there twice"),
        (((0,), (1, 0)), "(1, 0) has no parent: (1,) is missing"),
        (((),), "() is no path of ranks"),
        (((-1,),), "(-1,) is no path of ranks"),
    ],
)
def test_what_is_no_tree(choices: Sequence[Sequence[int]], words: str) -> None:
    """The path that is wrong is named."""
    with pytest.raises(ValueError) as caught:
        Tree.of(choices)

    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["independent", "sequential"])
def test_a_tree_that_needs_more_than_there_is(kind: str, folder: Path, tmp_path: Path) -> None:
    """More heads, or ranks than a head has candidates: refused with both numbers."""
    heads, _, _ = made(folder, tmp_path / "h.safetensors", kind)
    hidden, last = drawn(1)
    with pytest.raises(ValueError, match="it is 5 deep and there are 4 heads"):
        heads.tree(hidden, last, Tree.chain(5))
    with pytest.raises(ValueError, match="it has rank 30 and each head has 30 candidates"):
        heads.tree(hidden, last, Tree.of([(30,)]))
