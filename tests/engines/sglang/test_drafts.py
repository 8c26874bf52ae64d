"""Drafts on SGLang: the same tokens as without them, whatever is drafted and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

pytest.importorskip("sglang")

import sglang
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from chunkllm_bridge.common.control import Set, Status
from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.sglang import Engine, algorithm, launch
from chunkllm_bridge.sglang.verify import accept, shape_of
from tests.engines.sglang import replay
from tests.engines.sglang.test_offline import PAGE, PAGES, SAMPLING, answers, prompts, ratio

TOKENS, BRANCHES = 5, 2


class Letters(CustomLogitProcessor):
    """Lets nothing pass but small letters."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        kept = logits[:, 97:123].clone()
        logits.fill_(-1e9)
        logits[:, 97:123] = kept
        return logits


@attrs.define
class Stock:
    """What the engine says without us."""

    greedy: list[list[int]]
    asked: list[Any] = attrs.field(factory=list)
    penalised: list[list[int]] = attrs.field(factory=list)


OPTIONS: dict[str, Any] = {"enable_custom_logit_processor": True}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Nothing is compiled for a model so small, and other tests may run beside."""
    patch = pytest.MonkeyPatch()
    patch.setenv("CHUNKLLM_CPU_COMPILE", "0")
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("TORCHDYNAMO_DISABLE", "1")  # SGLang's own sampling compiles pieces
    yield
    patch.undo()


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Starts an engine of a class (stock or ours) as a context. Two of them must not live at once."""

    @contextlib.contextmanager
    def start(cls: type, **options: Any) -> Iterator[Any]:
        defaults = {
            "model_path": str(tiny_model),
            "dtype": "float32",
            "device": "cpu",
            "page_size": PAGE,
            "max_total_tokens": PAGE * PAGES,
            "mem_fraction_static": 0.5,
            "chunked_prefill_size": 64,
            "max_running_requests": 12,
            "log_level": "error",
        }
        engine = cls(**{**defaults, **OPTIONS, **options})
        try:
            yield engine
        finally:
            engine.shutdown()

    return start


@pytest.fixture(scope="module")
def stock(started) -> Stock:
    with started(sglang.Engine) as engine:
        greedy = answers(engine)
        stock = Stock(greedy)
        stock.asked = ask(engine, questions(greedy))
        stock.penalised = one_by_one(engine, PENALTIES)
    return stock


@pytest.fixture(scope="module")
def memory(tiny_model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The plugin is installed, and knows the stock engine's greedy texts."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("replay")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    texts = [(tokenizer(prompt).input_ids, said) for prompt, said in zip(prompts(16), stock.greedy, strict=True)]
    replay.remember(tiny_model, texts, folder / "memory")
    patch = pytest.MonkeyPatch()
    site = replay.lay(folder / "site")
    patch.syspath_prepend(site)
    patch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
    yield folder / "memory"
    patch.undo()


def sets(memory: Path, **own: Any) -> dict[str, Any]:
    return {
        "speculative.plugin": "replay",
        "speculative.tokens": TOKENS,
        "plugins.replay.memory": str(memory),
        **{f"plugins.replay.{name}": value for name, value in own.items()},
    }


@pytest.fixture(scope="module")
def engine(started, memory) -> Iterator[Any]:
    """One that was launched to verify trees of `BRANCHES` wrong brothers per token."""
    with started(Engine, plugin="chunkllm", plugin_set=sets(memory, branches=BRANCHES, mistakes=0.6)) as engine:
        yield engine


@pytest.fixture
def chains(engine) -> Iterator[Any]:
    """The same engine with chains, all tokens and the whole pool, whatever a test before left behind."""
    total = engine.chunkllm.status()
    ours = {"branches": 0, "mistakes": 0.6, "fault": "", "watch": ""}
    values = {f"plugins.replay.{name}": value for name, value in ours.items()}
    engine.chunkllm.set({"speculative.plugin": "replay", "speculative.tokens": TOKENS, **values})
    engine.chunkllm.set({"kv_cache.memory_ratio": ratio(total, PAGES)})
    return engine


def counted(engine: Any) -> dict[str, Any]:
    return dict(engine.chunkllm.status()["speculation"])


PENALTIES = [
    {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **penalty}
    for penalty in (
        {"frequency_penalty": 1.2},
        {},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 5},
        {},
        {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
    )
]


def one_by_one(engine: Any, sampling: list[dict[str, Any]]) -> list[list[int]]:
    return [
        engine.generate(prompt, params)["output_ids"] for prompt, params in zip(prompts(16), sampling, strict=False)
    ]


def questions(greedy: list[list[int]]) -> list[dict[str, Any]]:
    """Everything that a request may ask for and that a draft must not change."""
    plain = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    text = [bytes(ids).decode() for ids in greedy]
    asked = [
        {"sampling_params": plain, "return_logprob": True, "top_logprobs_num": 3},
        {"sampling_params": plain, "return_logprob": True, "token_ids_logprob": [65, 97]},
        {"sampling_params": plain | {"logit_bias": {"120": 3.0, "32": -5.0}}},
        {"sampling_params": plain | {"stop": text[3][7:9]}},
        {"sampling_params": plain | {"stop_token_ids": [greedy[4][12]]}},
        {"sampling_params": plain | {"stop_token_ids": [greedy[5][3]], "stop": text[5][3:6]}},
        {"sampling_params": plain | {"max_new_tokens": 1}},
        {"sampling_params": plain | {"max_new_tokens": 2}},
        {"sampling_params": plain | {"max_new_tokens": 4}},
        {"sampling_params": {"temperature": 0.8, "top_k": 1, "max_new_tokens": 40, "ignore_eos": True}},
        {"sampling_params": {"temperature": 0, "max_new_tokens": 40, "regex": "[a-z]{3}( [A-Z]{2,4}){2,6}\\."}},
        {"sampling_params": plain | {"custom_params": {}}, "custom_logit_processor": Letters().to_str()},
        {"sampling_params": {"temperature": 0.8, "top_k": 1, "max_new_tokens": 40, "ignore_eos": True}},
        {"sampling_params": plain},
    ]
    return [{"prompt": prompt, **question} for prompt, question in zip(prompts(16), asked, strict=False)]


def ask(engine: Any, questions: list[dict[str, Any]]) -> list[Any]:
    async def everything() -> list[Any]:
        return await asyncio.gather(*(engine.async_generate(**question) for question in questions))

    found = []
    for answer in engine.loop.run_until_complete(everything()):
        meta = answer["meta_info"]
        kept = [
            meta.get(name) for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
        ]
        found.append((answer["output_ids"], meta["finish_reason"], answer["text"], kept))
    return found


class TestTokens:
    @pytest.mark.parametrize("branches", [0, BRANCHES], ids=["chains", "trees"])
    def test_same_tokens_with_any_number_of_drafts(self, chains, stock, branches) -> None:
        """Sixteen prompts of mixed lengths, prefilled in chunks and from the cache, at once and one by one, with 1 to 5
        draft tokens of which some are wrong: the stock engine's tokens, and drafts were accepted."""
        chains.chunkllm.set({"plugins.replay.branches": branches})
        for tokens in (5, 1, 2, 3, 4):
            chains.chunkllm.set({"speculative.tokens": tokens})
            before = counted(chains)

            assert stock.greedy == answers(chains)
            for number in (0, 7):
                assert stock.greedy[number] == chains.generate(prompts(16)[number], SAMPLING[number])["output_ids"]

            after = counted(chains)
            assert tokens == after["limit"]
            assert after["accepted"] > before["accepted"]
            assert after["draft_tokens"] > after["accepted"]

    @pytest.mark.parametrize("branches", [0, BRANCHES], ids=["chains", "trees"])
    def test_whatever_a_request_asks_for(self, chains, stock, branches) -> None:
        """Log-probabilities, biases, stop strings and tokens inside a draft, ends inside a draft, a grammar, a logit
        processor that reads what was said: as without drafts, in one batch."""
        chains.chunkllm.set({"plugins.replay.branches": branches, "plugins.replay.mistakes": 0.3})

        for expected, found in zip(stock.asked, ask(chains, questions(stock.greedy)), strict=True):
            assert expected[:3] == found[:3]
            for wanted, given in zip(expected[3], found[3], strict=True):
                assert shape(wanted) == shape(given)
                assert flat(wanted) == pytest.approx(flat(given), abs=1e-4)

    def test_penalties_count_every_token(self, chains, stock) -> None:
        """Requests with penalties get them as without drafts: they verify none, and those beside them do. (In a batch
        SGLang counts some tokens a step late, so what is compared runs alone.)"""
        assert stock.penalised == one_by_one(chains, PENALTIES)

        chains.chunkllm.set({"plugins.replay.mistakes": 0.0})
        found = chains.generate(prompts(16)[:7], PENALTIES)

        steps = [answer["meta_info"]["spec_verify_ct"] for answer in found]
        assert [23, 23, 23, 23, 23] == [steps[number] for number in (0, 2, 3, 4, 6)]
        assert max(steps[1], steps[5]) < 12

    def test_counts_add_up(self, chains, stock) -> None:
        """Each token is a prefill's, a step's own, or an accepted draft; each step with drafts is counted."""
        chains.chunkllm.set({"plugins.replay.mistakes": 0.0})
        before = counted(chains)

        found = chains.generate(prompts(16), SAMPLING)

        after = counted(chains)
        accepted, drafts = (after[key] - before[key] for key in ("accepted", "drafts"))
        steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in found)
        assert sum(map(len, stock.greedy)) == accepted + steps + len(found)
        assert 0 < drafts <= steps
        assert accepted == sum(after["accepted_at"]) - sum(before["accepted_at"])
        assert accepted / drafts > 4

    def test_the_texts_that_the_plugin_sees(self, chains, stock, tmp_path) -> None:
        """At every step of every request its prompt and what it has said so far, whole or from any place on, while
        drafts are in flight and the schedule runs ahead: with cached prefixes and prompts that are prefilled in chunks,
        and with whatever happens while it serves, preemptions too."""
        quiet, wild = tmp_path / "quiet", tmp_path / "wild"
        chains.chunkllm.set({"plugins.replay.watch": str(quiet)})
        asked = [
            {"prompt": prompt, "sampling_params": sampling, "rid": f"request-{number}-quiet"}
            for number, (prompt, sampling) in enumerate(zip(prompts(16), SAMPLING, strict=True))
        ]
        assert stock.greedy == [answer[0] for answer in ask(chains, asked)]
        before = chains.chunkllm.status()["kv"]["preempted"]
        chains.chunkllm.set({"plugins.replay.watch": str(wild)})
        disturbed(chains, stock, steps=20)

        assert before < chains.chunkllm.status()["kv"]["preempted"]
        seen: dict[str, list[int]] = {}
        for name, text, newest, in_parts in [*written(quiet), *written(wild)]:
            number = int(name.split("-")[1]) % 16
            prompt = chains.tokenizer_manager.tokenizer(prompts(16)[number]).input_ids
            whole = [*prompt, *stock.greedy[number]]
            # scheduled ahead, one that is over is drafted for once more
            assert (whole[: len(text)], text[-1], True) == (text[: len(whole)], newest, in_parts)
            assert len(text) > seen.setdefault(name, [len(prompt)])[-1]
            seen[name].append(len(text))
        assert 16 == sum(name.endswith("quiet") for name in seen) < len(seen)
        assert all(lengths[1] == lengths[0] + 1 for name, lengths in seen.items() if name.endswith("quiet"))
        assert 2 < max(late - early for lengths in seen.values() for early, late in itertools.pairwise(lengths))

    def test_off_and_on_while_it_serves(self, chains, stock) -> None:
        """Off: plain decodes, nothing is counted. On again: drafts are."""
        chains.chunkllm.set({"speculative.plugin": "none"})
        before = counted(chains)
        assert stock.greedy == answers(chains)
        after = counted(chains)
        chains.chunkllm.set({"speculative.plugin": "replay"})
        assert stock.greedy == answers(chains)

        assert (0, before["drafts"]) == (after["limit"], after["drafts"])
        assert counted(chains)["drafts"] > after["drafts"]

    @pytest.mark.parametrize(
        ("fault", "kind"),
        [
            ("raises", "exception"),
            ("late", "deadline"),
            ("shape", "malformed"),
            ("type", "malformed"),
            ("an answer", "malformed"),
            ("wide", "rejected"),
            ("tree", "malformed"),
            ("vocabulary", None),
            ("nonsense", None),
        ],
    )
    def test_no_request_pays_for_a_plugin(self, chains, stock, fault, kind) -> None:
        """A plugin that raises, is late or answers nonsense costs its drafts: the texts are the stock engine's."""
        chains.chunkllm.set({"plugins.replay.fault": fault})

        found = chains.generate(prompts(2), {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True})
        assert [ids[:8] for ids in stock.greedy[:2]] == [answer["output_ids"] for answer in found]

        worker = chains.chunkllm.status()["workers"][0]
        seat = next(row for row in worker["plugins"] if row["name"] == "replay")
        assert (kind is not None) == (seat["failures"].get(kind, 0) > 0)

    def test_refused_changes(self, chains) -> None:
        """More tokens than the engine made room for, and none at all: refused with the reason, and nothing changes."""
        before = chains.chunkllm.config()
        for values in ({"speculative.tokens": TOKENS + 1}, {"speculative.tokens": 0}):
            with pytest.raises(ControlError):
                chains.chunkllm.set(values)
        assert before == chains.chunkllm.config()

    def test_whatever_happens_while_it_serves(self, chains, stock) -> None:
        """Quotas jump, drafts get longer and shorter, stop and start, chains become trees, clients leave: the texts
        that were finished are the stock engine's, every reading is conserved, and nothing is held in the end."""
        disturbed(chains, stock, steps=40)

        kv = chains.chunkllm.status()["kv"]
        assert (0, 0) == (kv["held"], kv["violations"])
        assert 0 < kv["preempted"]


def disturbed(engine: Any, stock: Stock, *, steps: int) -> None:
    chance, line = random.Random(5), engine.tokenizer_manager.chunkllm.line
    total = engine.chunkllm.status()
    tasks: list[asyncio.Task[Any]] = []

    async def answer(number: int) -> tuple[list[int], str]:
        rid = f"request-{number}-{chance.random()}"
        asking = asyncio.ensure_future(engine.async_generate(prompts(16)[number], SAMPLING[number], rid=rid))
        if number % 5 == 4:
            await asyncio.wait({asking}, timeout=chance.random() / 4)
            engine.tokenizer_manager.abort_request(rid=rid)
        found = await asking
        return found["output_ids"], found["meta_info"]["finish_reason"]["type"]

    async def disturb() -> None:
        done = 0
        while done < steps or not all(task.done() for task in tasks):
            done += 1
            if done < steps and all(task.done() for task in tasks):
                tasks.extend(asyncio.ensure_future(answer(number)) for number in range(16))
            values = {
                "kv_cache.memory_ratio": ratio(total, chance.choice([2, 5, 10, 20, 40, PAGES])),
                "speculative.tokens": chance.randint(1, TOKENS),
                "speculative.plugin": chance.choice(["replay", "replay", "replay", "none"]),
                "plugins.replay.branches": chance.choice([0, BRANCHES]),
            }
            reply = await line.send(Set(values=values))
            assert not reply.error
            for _ in range(chance.randint(1, 3)):
                status = (await line.send(Status())).data
                kv, running = status["kv"], status["requests"]["running"]
                assert kv["conserved"] and status["in_step"]
                if kv["steps"] > reply.data["kv"]["steps"]:
                    assert kv["held"] <= kv["limit"] or running <= 1

    engine.loop.run_until_complete(disturb())
    engine.chunkllm.set({"kv_cache.memory_ratio": ratio(total, PAGES), "speculative.plugin": "replay"})
    outcomes = [task.result() for task in tasks]
    wrong = [
        number for number, (ids, why) in enumerate(outcomes) if why != "abort" and ids != stock.greedy[number % 16]
    ]
    assert [] == wrong
    assert len(outcomes) >= 16


def written(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("memory")
def test_two_ranks_verify_alike(started, stock, memory, tmp_path, monkeypatch) -> None:
    """Each rank verifies by itself: the drafts are the first one's on both, with pages of one token too, and without
    the overlapped schedule; the embedding that plugins see is whole on each. There they see texts as well: at every
    step each request's prompt and what it has said so far, whole or from any place on, with drafts in flight, cached
    prefixes, and prompts that are prefilled in chunks."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    options = {"tp_size": 2, "page_size": 1, "max_total_tokens": PAGE * PAGES, "disable_overlap_schedule": True}
    ours = sets(memory, branches=BRANCHES, mistakes=0.6, watch=str(tmp_path / "texts"))

    with started(Engine, plugin="chunkllm", plugin_set=ours, **options) as engine:
        assert stock.greedy == answers(engine)
        before = counted(engine)
        engine.chunkllm.set({"plugins.replay.branches": 0, "speculative.tokens": 3})
        assert stock.greedy == answers(engine)
        status = engine.chunkllm.status()
        tokenizer = engine.tokenizer_manager.tokenizer

    assert status["speculation"]["accepted"] > before["accepted"] > 0
    assert status["in_step"] and 2 == status["ranks"]
    wholes = [[*tokenizer(prompt).input_ids, *said] for prompt, said in zip(prompts(16), stock.greedy, strict=True)]
    lengths: dict[str, list[int]] = {}
    for name, text, newest, in_parts in written(tmp_path / "texts"):
        assert any(text == whole[: len(text)] for whole in wholes)
        assert (newest, True) == (text[-1], in_parts)
        lengths.setdefault(name, []).append(len(text))
    assert 32 == len(lengths)
    assert all(sorted(set(found)) == found for found in lengths.values())
    assert 2 < max(late - early for found in lengths.values() for early, late in itertools.pairwise(found))


class TestLaunch:
    """Before anything is started."""

    def test_a_second_algorithm_is_refused(self, memory) -> None:
        """SGLang's own speculation beside a drafting plugin: both are named, and so is what else cannot go along."""
        spec = resolved(memory)
        args = SimpleNamespace(speculative_algorithm="NGRAM", enable_lora=True, speculative_num_draft_tokens=4)

        with pytest.raises(IncompatibleError) as refusal:
            algorithm.launched(spec, args)

        for part in ("--speculative-algorithm NGRAM", "speculative.plugin = replay", "--enable-lora", "draft-tokens 4"):
            assert part in str(refusal.value)

    @pytest.mark.parametrize("own", [{"plugin.disable": "replay"}, {"speculative.plugin": "none"}])
    def test_nobody_drafts(self, memory, own) -> None:
        """A plugin that is switched off, and none: SGLang is launched without speculation."""
        assert {} == algorithm.launched(resolved(memory, **own), SimpleNamespace())

    def test_room_is_made(self, memory) -> None:
        """The newest token and each draft get a slot, trees get one for each node."""
        chain, tree = resolved(memory), resolved(memory, **{"plugins.replay.branches": 2})

        for spec, nodes, topk in ((chain, 5, 1), (tree, 15, 2)):
            fields = algorithm.launched(spec, SimpleNamespace())
            assert ("CHUNKLLM", nodes + 1, 5, topk) == (
                fields["speculative_algorithm"],
                fields["speculative_num_draft_tokens"],
                fields["speculative_num_steps"],
                fields["speculative_eagle_topk"],
            )


def resolved(memory: Path, **own: Any) -> Any:
    wish = launch.Wish(None, tuple(launch.launching.wish_sets({**sets(memory), **own})))
    return launch.resolve(wish).spec


class TestVerification:
    @pytest.mark.parametrize("seed", range(20))
    def test_it_walks_the_tree(self, seed) -> None:
        """Chains and trees of any shape: what is accepted is what a walk from the root along equal tokens gives."""
        chance = random.Random(seed)
        width, requests = chance.randint(1, 9), chance.randint(1, 5)
        parents = None if seed % 4 == 0 else tuple(chance.randint(-1, column - 1) for column in range(width))
        drafts = torch.tensor([[chance.randint(-1, 2) for _ in range(width)] for _ in range(requests)])
        chosen = torch.tensor([[chance.randint(0, 2) for _ in range(width + 1)] for _ in range(requests)])

        found = accept(shape_of(width, parents, torch.device("cpu")), drafts, chosen)

        for row in range(requests):
            path = walked(drafts[row].tolist(), chosen[row].tolist(), parents or tuple(range(-1, width - 1)))
            assert len(path) - 1 == found.counts[row]
            assert path[-1] == found.last[row]
            if found.paths is not None:
                assert path == found.paths[row, : len(path)].tolist()

    def test_a_tree_that_is_a_chain(self) -> None:
        """The same rows are seen, and the same drafts accepted."""
        device = torch.device("cpu")
        tree, chain = shape_of(3, (-1, 0, 1), device), shape_of(3, None, device)
        drafts, chosen = torch.tensor([[1, 2, 3], [1, 5, 3]]), torch.tensor([[1, 2, 4, 0], [1, 2, 3, 0]])

        assert torch.equal(torch.ones(4, 4).tril().bool(), tree.sees)
        assert accept(chain, drafts, chosen).counts.tolist() == accept(tree, drafts, chosen).counts.tolist() == [2, 1]


def walked(drafts: list[int], chosen: list[int], parents: tuple[int, ...]) -> list[int]:
    path = [0]
    while True:
        right = [
            column + 1
            for column, parent in enumerate(parents)
            if parent + 1 == path[-1] and drafts[column] == chosen[path[-1]]
        ]
        if not right:
            return path
        path.append(right[0])


def shape(value: Any) -> Any:
    return [shape(part) for part in value] if isinstance(value, list | tuple) else type(value)


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [number for part in value for number in flat(part)]
    return [value] if isinstance(value, int | float) else []
