"""The oracle against torch's own attention, the definition of FP8 and the laws of chance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chunkllm_bridge.common.reference import (
    E4M3_MAX,
    e4m3_decode,
    fp8_dequantise,
    fp8_round,
    paged_attention,
    verify_chain,
    verify_tree,
    write_kv,
)

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
SCALE = HEAD_SIZE**-0.5


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These tensors are small: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Batch:
    """Requests of (query length, whole length), their tokens dense and the same tokens in pages."""

    def __init__(self, requests: list[tuple[int, int]], *, block_size: int = 4, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.requests = requests
        self.block_size = block_size
        self.query = self.normal(sum(queries for queries, _ in requests), HEADS)
        self.keys = [self.normal(length, KV_HEADS) for _, length in requests]
        self.values = [self.normal(length, KV_HEADS) for _, length in requests]
        self.lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
        self.starts = torch.tensor([0] + [queries for queries, _ in requests]).cumsum(0).to(torch.int32)
        pages = [math.ceil(length / block_size) for _, length in requests]
        self.blocks = sum(pages) + 3
        order = iter(torch.randperm(self.blocks, generator=self.generator).tolist())
        self.table = torch.full((len(requests), max(pages) + 1), -1, dtype=torch.int32)  # -1: never to be read
        for row, count in zip(self.table, pages, strict=True):
            row[:count] = torch.tensor([next(order) for _ in range(count)])

    def normal(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, HEAD_SIZE, generator=self.generator)

    def empty_cache(self) -> Tensor:
        """Poisoned: what is read before it was written shows (vllm#39146)."""
        return torch.full((self.blocks, self.block_size, KV_HEADS, HEAD_SIZE), float("nan"))

    def fill(self, key_cache: Tensor, value_cache: Tensor) -> None:
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            position = torch.arange(len(keys))
            slots = self.table[i][position // self.block_size] * self.block_size + position % self.block_size
            write_kv(keys, values, key_cache, value_cache, slots)

    def paged(self, *, window: int | None = None) -> Tensor:
        key_cache, value_cache = self.empty_cache(), self.empty_cache()
        self.fill(key_cache, value_cache)
        return self.attend(key_cache, value_cache, window=window)

    def attend(self, key_cache: Tensor, value_cache: Tensor, *, window: int | None = None) -> Tensor:
        return paged_attention(
            self.query, key_cache, value_cache, self.table, self.starts, self.lengths, SCALE, sliding_window=window
        )

    def dense(self, *, window: int | None = None) -> Tensor:
        """The same by torch, one request after the other."""
        outputs = []
        for (first, last), keys, values in zip(pairwise(self.starts.tolist()), self.keys, self.values, strict=True):
            visible = torch.ones(last - first, len(keys), dtype=torch.bool).tril(len(keys) - (last - first))
            if window is not None:
                visible &= ~visible.tril(-window + len(keys) - (last - first))
            output = torch.nn.functional.scaled_dot_product_attention(
                self.query[first:last].transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                attn_mask=visible,
                scale=SCALE,
                enable_gqa=True,
            )
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    requests = [(draw(st.sampled_from([1, length, draw(st.integers(1, length))])), length) for length in lengths]
    return Batch(requests, block_size=draw(st.sampled_from([1, 4, 16])), seed=draw(st.integers(0, 2**16)))


class TestAttention:
    @settings(max_examples=60, deadline=None)
    @given(batch=batches(), window=st.none() | st.integers(1, 45))
    def test_equals_torch(self, batch: Batch, window: int | None) -> None:
        """Ragged batches of prefills, chunks and decodes, with grouped heads and any window."""
        torch.testing.assert_close(batch.dense(window=window), batch.paged(window=window), rtol=1e-5, atol=1e-6)

    def test_places_do_not_matter(self) -> None:
        """Moving every block and its table entry changes no bit."""
        batch = Batch([(1, 9), (5, 13), (7, 7)])
        key_cache, value_cache = batch.empty_cache(), batch.empty_cache()
        batch.fill(key_cache, value_cache)
        before = batch.attend(key_cache, value_cache)

        places = torch.randperm(batch.blocks, generator=batch.generator)
        moved = [torch.empty_like(cache).index_copy(0, places, cache) for cache in (key_cache, value_cache)]
        batch.table = torch.where(batch.table < 0, -1, places[batch.table.long()])

        assert torch.equal(before, batch.attend(*moved))

    def test_both_layouts(self) -> None:
        """[blocks, 2, size, heads, dim] and [blocks, heads, size, 2 dim] are views of one contract (LMCache#4463)."""
        batch = Batch([(1, 9), (5, 13)])
        size = batch.block_size
        old = torch.zeros(batch.blocks, 2, size, KV_HEADS, HEAD_SIZE)
        new = torch.zeros(batch.blocks, KV_HEADS, size, 2 * HEAD_SIZE).transpose(1, 2)
        outputs = []
        for caches in ((old[:, 0], old[:, 1]), (new[..., :HEAD_SIZE], new[..., HEAD_SIZE:])):
            batch.fill(*caches)
            outputs.append(batch.attend(*caches))

        assert torch.equal(batch.paged(), outputs[0])
        assert torch.equal(batch.paged(), outputs[1])
        assert old.any()
        assert new.any()

    def test_a_window_of_one_is_the_token_itself(self) -> None:
        batch = Batch([(3, 5)])

        expected = batch.values[0][-3:].repeat_interleave(HEADS // KV_HEADS, dim=1)
        torch.testing.assert_close(expected, batch.paged(window=1))

    def test_a_window_as_long_as_the_text_is_none(self) -> None:
        batch = Batch([(3, 5)])

        assert torch.equal(batch.paged(), batch.paged(window=5))

    def test_padding(self) -> None:
        """Requests without queries and rows without a request are left alone."""
        batch = Batch([(2, 6)])
        expected = batch.paged()
        batch.query = torch.cat([batch.query, torch.ones(3, HEADS, HEAD_SIZE)])
        batch.starts = torch.tensor([0, 2, 2])
        batch.lengths = torch.tensor([6, 0])
        batch.table = torch.cat([batch.table, torch.full_like(batch.table, -1)])

        output = batch.paged()
        assert torch.equal(expected, output[:2])
        assert not output[2:].any()

    def test_accumulates_in_float32(self) -> None:
        """bfloat16 in, bfloat16 out, and only the last rounding in between."""
        batch = Batch([(4, 30)])
        batch.query = batch.query.bfloat16()
        batch.keys = [keys.bfloat16().float() for keys in batch.keys]
        batch.values = [values.bfloat16().float() for values in batch.values]
        caches = [batch.empty_cache().bfloat16() for _ in range(2)]
        batch.fill(caches[0], caches[1])

        output = batch.attend(caches[0], caches[1])
        batch.query = batch.query.float()
        assert torch.bfloat16 == output.dtype
        torch.testing.assert_close(batch.dense(), output.float(), rtol=2**-8, atol=1e-6)

    def test_padded_slots_are_not_written(self) -> None:
        batch = Batch([(1, 4)])
        key_cache, value_cache = batch.empty_cache(), batch.empty_cache()

        write_kv(batch.keys[0], batch.values[0], key_cache, value_cache, torch.tensor([-1, 0, -1, 5]))

        assert 2 == key_cache.isfinite().all(-1).all(-1).sum()
        assert torch.equal(batch.keys[0][[1, 3]], key_cache.flatten(0, 1)[[0, 5]])
        assert torch.equal(batch.values[0][[1, 3]], value_cache.flatten(0, 1)[[0, 5]])


def chi_square(observed: Tensor, expected: Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


class TestVerification:
    @pytest.mark.parametrize(
        ("draft", "emitted"),
        [([1, 2, 3], [1, 2, 3, 4]), ([1, 2, 0], [1, 2, 3]), ([0, 2, 3], [1]), ([], [1])],
    )
    def test_greedy(self, draft: list[int], emitted: list[int]) -> None:
        """The longest prefix that the target agrees with, and its own next token."""
        logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 3, 4]), 6).float()

        assert emitted == verify_chain(draft, logits[: len(draft) + 1], temperature=0)

    def test_uniforms_decide(self) -> None:
        """A draft of probability 0.25 is kept below that, and never drawn again once refused."""
        logits = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()

        def emitted(accept: float, draw: float, bonus: float = 0.0) -> list[int]:
            uniforms = torch.tensor([[accept, draw], [0.0, bonus]])
            return verify_chain([0], logits, temperature=1, uniforms=uniforms)

        assert [0, 0] == emitted(0.24, 0.0)
        assert [0, 2] == emitted(0.24, 0.0, bonus=0.8)
        assert [1] == emitted(0.26, 0.0)
        assert [1] == emitted(0.26, 0.66)
        assert [2] == emitted(0.26, 0.67)
        assert [2] == emitted(0.99, 1 - 2**-24)

    def test_what_cannot_be_is_never_emitted(self) -> None:
        """Masked tokens stay masked, in drafts and in draws (vllm#9423)."""
        logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).repeat(3, 1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            assert {0, 2}.issuperset(verify_chain([2, 1], logits, temperature=0.7, generator=generator))
        for edge, last in ((0.0, 0), (1 - 2**-53, 2)):
            uniforms = torch.full((2, 2), edge, dtype=torch.float64)
            assert [last] == verify_chain([1], logits[:2], temperature=0.7, uniforms=uniforms)

    def test_a_perfect_draft_is_always_kept(self) -> None:
        """Proposal and target alike: nothing is refused, rounding included."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(4, 50, generator=generator)
        probs = (logits / 0.8).softmax(-1)
        for _ in range(100):
            draft = torch.multinomial(probs[:3], 1, generator=generator).flatten().tolist()
            emitted = verify_chain(draft, logits, temperature=0.8, generator=generator, draft_probs=probs[:3])
            assert draft == emitted[:3]
            assert 4 == len(emitted)

    @pytest.mark.parametrize("drafting", ["certain", "drawn"])
    def test_keeps_the_distribution(self, drafting: str) -> None:
        """Two tokens from drafts are distributed as two from the target (arXiv 2211.17192): chi-square, 15 degrees."""
        vocab, temperature, samples = 4, 1.3, 4_000
        generator = torch.Generator().manual_seed(221117192)
        logits = torch.randn(vocab + 1, vocab, generator=generator) * 1.5  # row: what follows each token; last: start
        target = (logits / temperature).softmax(-1)
        proposal = torch.randn(vocab + 1, vocab, generator=generator).softmax(-1)
        expected = target[-1][:, None] * target[:-1] * samples

        observed, drafted = torch.zeros(vocab, vocab), torch.zeros(vocab, vocab)
        for _ in range(samples):
            if drafting == "certain":
                first, second = 2, 1
            else:
                first = int(torch.multinomial(proposal[-1], 1, generator=generator))
                second = int(torch.multinomial(proposal[first], 1, generator=generator))
            emitted = verify_chain(
                [first, second],
                logits[[-1, first, second]],
                temperature=temperature,
                generator=generator,
                draft_probs=proposal[[-1, first]] if drafting == "drawn" else None,
            )
            if len(emitted) == 1:
                emitted.append(int(torch.multinomial(target[emitted[0]], 1, generator=generator)))
            observed[emitted[0], emitted[1]] += 1
            drafted[first, second] += 1

        critical = 37.7  # chi-square, 15 degrees of freedom, one in a thousand
        assert chi_square(observed, expected) < critical
        assert chi_square(drafted, expected) > 10 * critical  # the test can tell


class TestTrees:
    PARENTS = (-1, -1, 0, 0, 1, 2)

    @pytest.mark.parametrize(
        ("draft", "emitted", "path"),
        [
            ([1, 9, 2, 8, 7, 3], [1, 2, 3, 4], [0, 2, 5]),
            ([1, 9, 8, 2, 7, 3], [1, 2, 3], [0, 3]),
            ([9, 1, 7, 7, 2, 3], [1, 2, 3], [1, 4]),
            ([9, 8, 2, 2, 2, 3], [1], []),
        ],
    )
    def test_greedy(self, draft: list[int], emitted: list[int], path: list[int]) -> None:
        """The path on which the target agrees with every token, whichever branch that is, and its next token."""
        depths = (0, 1, 1, 2, 2, 2, 3)  # of the root, then of each node
        logits = torch.nn.functional.one_hot(torch.tensor([1 + depth for depth in depths]), 10).float()

        assert (emitted, path) == verify_tree(draft, self.PARENTS, logits, temperature=0)

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_a_chain_is_a_tree(self, temperature: float) -> None:
        """With the same uniforms the same tokens, always."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(200):
            logits = torch.randn(4, 6, generator=generator) * 2
            draft = torch.randint(6, (3,), generator=generator).tolist()
            uniforms = torch.rand(4, 2, generator=generator)
            chain = verify_chain(draft, logits, temperature=temperature, uniforms=uniforms)
            tree = verify_tree(draft, (-1, 0, 1), logits, temperature=temperature, uniforms=uniforms)

            assert (chain, list(range(len(chain) - 1))) == tree

    def test_no_drafts_no_siblings(self) -> None:
        logits = torch.tensor([[0.0, 5.0]])

        assert ([1], []) == verify_tree((), (), logits, temperature=0)

    def test_what_cannot_be_is_never_emitted(self) -> None:
        """A masked token is neither accepted nor drawn, though all siblings were refused (vllm#9423)."""
        logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).repeat(4, 1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            emitted, _ = verify_tree([1, 3, 1], (-1, -1, -1), logits, temperature=0.7, generator=generator)
            assert {0, 2}.issuperset(emitted)

    def test_keeps_the_distribution(self) -> None:
        """Two tokens from a tree are distributed as two from the target (arXiv 2305.09781), a token drafted twice
        included: chi-square, 15 degrees."""
        vocab, temperature, samples = 4, 1.3, 4_000
        generator = torch.Generator().manual_seed(230509781)
        logits = torch.randn(vocab + 1, vocab, generator=generator) * 1.5  # row: what follows each token; last: start
        target = (logits / temperature).softmax(-1)
        expected = target[-1][:, None] * target[:-1] * samples
        draft, parents = [2, 1, 2, 0, 3, 1], (-1, -1, -1, 0, 0, 1)

        observed = torch.zeros(vocab, vocab)
        for _ in range(samples):
            emitted, _ = verify_tree(draft, parents, logits[[-1, *draft]], temperature=temperature, generator=generator)
            if len(emitted) == 1:
                emitted.append(int(torch.multinomial(target[emitted[0]], 1, generator=generator)))
            observed[emitted[0], emitted[1]] += 1

        assert chi_square(observed, expected) < 37.7  # one in a thousand


class TestFP8:
    def test_decodes_all_codes(self) -> None:
        """The definition and torch agree on 256 of 256 codes, signs of zero included."""
        codes = torch.arange(256).to(torch.uint8)
        torchs, ours = codes.view(torch.float8_e4m3fn).float(), e4m3_decode(codes)

        assert torch.equal(torchs.isnan(), ours.isnan())
        assert 2 == ours.isnan().sum()
        numbers = ~ours.isnan()
        assert torch.equal(torchs[numbers].view(torch.int32), ours[numbers].view(torch.int32))
        assert ours[numbers].max() == E4M3_MAX

    def test_rounds_to_the_nearest_even(self) -> None:
        """Against a search of the whole table, at every number, every midpoint and beside them."""
        codes = torch.arange(127)  # 0 to 448
        table = e4m3_decode(codes)
        middles = (table[1:] + table[:-1]) / 2
        beside = [torch.nextafter(middles, torch.tensor(side)) for side in (0.0, float("inf"))]
        x = torch.cat([table, middles, *beside])
        distance = (x[:, None] - table).abs()
        nearest = distance == distance.amin(-1, keepdim=True)
        even = codes[None] % 2 == 0
        expected = table[torch.where(nearest, 1 + even.int(), 0).argmax(-1)]

        for sign in (1, -1):
            values, scale = fp8_round(sign * x[None], axis=0)
            assert [[1.0]] == scale.tolist()
            assert torch.equal(sign * expected[None], values.float())

    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_error_is_bounded_per_channel(self, axis: int) -> None:
        """Half a step: 1/16 of a number, or of the smallest normal in its channel."""
        x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 40)
        values, scale = fp8_round(x, axis=axis)

        assert torch.float8_e4m3fn == values.dtype
        assert ((24, 1) if axis == 0 else (1, 40)) == scale.shape
        error = (fp8_dequantise(values, scale) - x).abs()
        assert (error <= torch.maximum(x.abs(), scale * 2**-6) * (1 / 16 + 1e-6)).all()
        assert (values.float().abs().amax(1 if axis == 0 else 0) == E4M3_MAX).all()

    def test_zeros_stay_zeros(self) -> None:
        x = torch.tensor([[0.0, 0.0], [1.0, -3.0], [1e-45, 0.0]])
        values, scale = fp8_round(x, axis=0)

        assert values.float().isfinite().all()
        assert [0.0, 0.0] == fp8_dequantise(values, scale)[0].tolist()
        assert -3.0 == fp8_dequantise(values, scale)[1, 1]
