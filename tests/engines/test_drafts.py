"""Draft tokens in vLLM's offline class, in this process: whatever is drafted, the tokens are the stock engine's."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm import SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from chunkllm_bridge.common.errors import ControlError, IncompatibleError
from chunkllm_bridge.patches import vllm as patches
from chunkllm_bridge.vllm import LLM, attach, drafts, launch
from chunkllm_bridge.vllm.weights import Weights

SOURCE = Path(__file__).with_name("recall.py")
WIDEST = 5
LONG = 300  # tokens of the context
SHARED = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must "
PROMPTS = {
    "one token": "x",
    "two tokens": "Hi",
    "three tokens": "Hey",
    "a few": "The capital of France is",
    "a block": SHARED[:32],
    "a block and one": SHARED[:33],
    "several chunks": SHARED + "be in want of a wife. However little known the feelings",
    "the same start": SHARED + "have a dog",
    "bytes": "Grüße aus Berlin",
}
LENGTHS = (61, 60, 1, 2, 3, 7, 58, 40, 33)  # tokens asked for, one per prompt


@attrs.frozen
class Job:
    prompt: str
    sampling: SamplingParams


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, **options)


JOBS = [Job(prompt, greedy(tokens)) for prompt, tokens in zip(PROMPTS.values(), LENGTHS, strict=True)]


@contextlib.contextmanager
def started(cls: type, model: Path, **options: Any) -> Iterator[Any]:
    llm = cls(
        str(model),
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": LONG,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,  # the longest prompts are prefilled in three steps
            "num_gpu_blocks_override": 61,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **options,
        },
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def install(root: Path) -> Path:
    """The plugin as a package that pip would have installed."""
    info = root / "other_recall-1.0.dist-info"
    info.mkdir(parents=True)
    (root / "recall_plugin.py").write_text(SOURCE.read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-recall\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chunkllm.plugins]\nrecall = recall_plugin:Recall\n")
    return root


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Engines run here, and leave this process as it was."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")),
        }.items():
            patch.setenv(name, value)
        patch.delenv("VLLM_PLUGINS", raising=False)
        patch.setattr("vllm.plugins.plugins_loaded", False)
        folder = install(tmp_path_factory.mktemp("site"))
        patch.syspath_prepend(folder)
        yield folder
        launch.unregister()
        envs.disable_envs_cache()
        sys.modules.pop("recall_plugin", None)
    torch.set_num_threads(threads)
    assert cores == os.sched_getaffinity(0)


@pytest.fixture(scope="module")
def stock(process: Path, tiny_model: Path) -> Callable[[Job], list[int]]:
    """What the engine says without speculation: asked once for all jobs, so that one engine lives at a time."""
    said: dict[Any, list[int]] = {}
    with started(vllm.LLM, tiny_model) as llm:
        for job in (*JOBS, *ENDS, *STRICT, *NEAR_THE_END):
            said[key(job)] = run(llm, [job])[0]
        for job in stops(said):
            said[key(job)] = run(llm, [job])[0]
        LOGPROBS.append(llm.generate([PROMPTS["a few"]], greedy(20, logprobs=3), use_tqdm=False)[0].outputs[0].logprobs)
    return lambda job: said[key(job)]


@pytest.fixture(scope="module")
def engine(stock: Any, tiny_model: Path) -> Iterator[Any]:
    """An engine that was launched to verify five draft tokens."""
    sets = {"speculative": {"plugin": "recall", "tokens": WIDEST}}
    with started(LLM, tiny_model, plugin="chunkllm", plugin_set=sets) as llm:
        recall = sys.modules["recall_plugin"].Recall
        longer = [Job(prompt, greedy(100)) for prompt in PROMPTS.values()]
        recall.read(lambda: run(llm, [*longer, *STRICT, NEAR_THE_END[0]]))
        yield llm


@pytest.fixture
def recall(engine: Any) -> Iterator[Any]:
    """The plugin's class, which drafts without mistakes until a test turns something."""
    recall = sys.modules["recall_plugin"].Recall
    recall.mistakes, recall.fault, recall.reading, recall.shown = 0.0, None, False, None
    recall.outcomes.clear()
    recall.steps.clear()
    yield recall
    recall.fault = recall.shown = None
    engine.chunkllm.set({"speculative.plugin": "none"})
    engine.chunkllm.set({"speculative.plugin": "recall", "speculative.tokens": WIDEST})


def key(job: Job) -> Any:
    return job.prompt, repr(job.sampling)


def run(llm: Any, jobs: Sequence[Job], *, together: bool = True) -> list[list[int]]:
    """The tokens of every job, all of them at once (eight run, the others wait) or one after the other."""
    if not together:
        return [tokens for job in jobs for tokens in run(llm, [job])]
    outputs = llm.generate([job.prompt for job in jobs], [job.sampling for job in jobs], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def steps(llm: Any, jobs: Sequence[Job], said: dict[str, list[int]]) -> Iterator[int]:
    """Step the engine by hand until all is done; `said` gets what each job has said so far, under its number."""
    for number, job in enumerate(jobs):
        llm.llm_engine.add_request(str(number), job.prompt, job.sampling)
    for number in itertools.count():
        if not llm.llm_engine.has_unfinished_requests():
            return
        said.update((output.request_id, list(output.outputs[0].token_ids)) for output in llm.llm_engine.step())
        yield number


def worker(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def drafted(llm: Any) -> dict[str, Any]:
    return dict(llm.chunkllm.status()["workers"][0]["drafts"])


def since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two reports."""
    at = [*before["accepted_at"], *[0] * (len(after["accepted_at"]) - len(before["accepted_at"]))]
    return {
        **{name: after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted")},
        "accepted_at": [late - early for early, late in zip(at, after["accepted_at"], strict=True)],
        "finished": sum(count for count, _ in after["finished"]) - sum(count for count, _ in before["finished"]),
    }


class TestSameTokens:
    @pytest.mark.parametrize("width", range(1, WIDEST + 1))
    @pytest.mark.parametrize("together", [False, True], ids=["one", "eight"])
    @pytest.mark.parametrize("mistakes", [0.0, 0.6])
    def test_for_every_width(self, engine, stock, recall, width, together, mistakes) -> None:
        """Prompts of one token and of three prefill steps, answers of 1 to 61 tokens, right and wrong drafts, alone and
        eight at a time, with cached prefixes: the stock engine's tokens, and the drafts were of use."""
        engine.chunkllm.set({"speculative.tokens": width})
        recall.mistakes = mistakes
        before = drafted(engine)

        assert [stock(job) for job in JOBS] == run(engine, JOBS, together=together)

        counts = since(before, drafted(engine))
        at = counts["accepted_at"][:width]
        assert sum(at) == counts["accepted"] <= counts["draft_tokens"] <= width * counts["drafts"]
        assert sorted(at, reverse=True) == at
        assert counts["drafts"] >= at[0]
        assert all(at), "drafts were accepted at every position"
        if not mistakes:
            assert counts["accepted"] == counts["draft_tokens"]
        else:
            assert counts["accepted"] < counts["draft_tokens"]

    @pytest.mark.parametrize("width", [1, 2, 4, 5])
    def test_right_drafts_save_the_steps_that_they_should(self, engine, stock, recall, width) -> None:
        """The prefill gives one token and every step a draft and one more, the last one no more than was asked for."""
        engine.chunkllm.set({"speculative.tokens": width})
        before = drafted(engine)
        job = JOBS[0]

        assert stock(job) == run(engine, [job])[0]

        tokens = job.sampling.max_tokens - 1
        full = -(-tokens // (width + 1))
        counts = since(before, drafted(engine))
        assert (full, tokens - full, 1) == (counts["drafts"], counts["accepted"], counts["finished"])
        assert counts["draft_tokens"] == counts["accepted"]

    def test_beside_a_prefill(self, engine, stock, recall) -> None:
        """Requests that join while others verify drafts, one of them with one prompt token, which vLLM pads with drafts
        that are none."""
        recall.mistakes = 0.3
        first, others = JOBS[3:4], [JOBS[0], JOBS[6], JOBS[4]]
        long = [Job(first[0].prompt, greedy(40)), *others]
        said: dict[str, list[int]] = {}
        for step in steps(engine, [Job(PROMPTS["a few"], greedy(100))], said):
            if step == 4:
                for number, job in enumerate(long, start=1):
                    engine.llm_engine.add_request(str(number), job.prompt, job.sampling)

        for number, job in enumerate(others, start=2):
            assert stock(job) == said[str(number)]
        assert said["1"] == said["0"][:40]


ENDS = [Job(PROMPTS[name], greedy(60)) for name in ("a few", "several chunks", "bytes")]


def stops(said: dict[Any, list[int]]) -> list[Job]:
    """The same prompts with a stop at a token or a text somewhere in the answer."""
    found = []
    for job in ENDS:
        tokens = said[key(job)]
        for place in (1, 2, 5, 6, 7, 11):
            text = "".join(chr(token) for token in tokens[place : place + 3])
            found.append(Job(job.prompt, greedy(60, stop_token_ids=[tokens[place]])))
            found.append(Job(job.prompt, greedy(60, stop=[text], include_stop_str_in_output=True)))
            found.append(Job(job.prompt, greedy(place + 1)))
    return found


class TestEnds:
    @pytest.mark.parametrize("mistakes", [0.0, 0.5])
    def test_inside_a_draft(self, engine, stock, recall, mistakes) -> None:
        """Stop tokens, stop texts and the number of tokens asked for, at every place of a draft."""
        recall.mistakes = mistakes
        jobs = stops({key(job): stock(job) for job in ENDS})

        assert [stock(job) for job in jobs] == run(engine, jobs)

    def test_at_the_end_of_the_context(self, engine, stock, recall) -> None:
        """A request runs into the longest context while another goes on: exact, and both still draft to the last."""
        before = drafted(engine)

        assert [stock(job) for job in NEAR_THE_END] == run(engine, NEAR_THE_END)

        counts = since(before, drafted(engine))
        assert counts["accepted"] > 0.5 * counts["draft_tokens"]
        assert LONG - len(NEAR_THE_END[0].prompt) == len(stock(NEAR_THE_END[0]))

    def test_an_abort(self, engine, stock, recall) -> None:
        """A request that goes away with drafts under way leaves the others' tokens alone, and nothing behind."""
        recall.mistakes = 0.3
        jobs = [JOBS[0], JOBS[1], JOBS[6]]
        said: dict[str, list[int]] = {}
        for step in steps(engine, jobs, said):
            if step == 6:
                engine.llm_engine.abort_request(["1"])
        for number in (0, 2):
            assert stock(jobs[number]) == said[str(number)]
        run(engine, JOBS[:1])
        assert not set(worker(engine).model_runner.requests) & {"0", "1", "2"}

    def test_a_quota_that_cuts(self, engine, stock, recall) -> None:
        """Requests preempted in the middle of their drafts get the same tokens in the end."""
        recall.mistakes = 0.3
        jobs = [JOBS[index] for index in (0, 1, 6, 7, 8, 6)]
        before = engine.chunkllm.status()["kv"]
        most = before["memory_ratio_max"]
        said: dict[str, list[int]] = {}
        for step in steps(engine, jobs, said):
            if step in (8, 14, 30):
                blocks = {8: 5, 14: 2, 30: 60}[step]
                engine.chunkllm.set({"kv_cache.memory_ratio": (blocks + 0.5) / (before["total"] + 1) * most})

        kv = engine.chunkllm.status()["kv"]
        assert [stock(job) for job in jobs] == [said[str(number)] for number in range(len(jobs))]
        assert before["preempted"] < kv["preempted"]
        assert (0, before["violations"], True) == (kv["held"], kv["violations"], kv["conserved"])


NEAR_THE_END = [Job(SHARED + SHARED, greedy(200)), Job(PROMPTS["a few"], greedy(100))]
STRICT = [
    Job(prompt, greedy(40, structured_outputs=StructuredOutputsParams(regex=pattern)))
    for prompt, pattern in (
        ("Say", r"[a-d]{3}-[0-9]{12}"),
        ("Say", r"(yes|no)( and (yes|no)){2}"),
        ("x", r"[A-Z ]{30}"),
    )
]
LOGPROBS: list[Any] = []


class TestSampling:
    @pytest.mark.parametrize("together", [False, True])
    def test_structured_outputs(self, engine, stock, recall, together) -> None:
        """Drafts that the grammar forbids are cut by the engine, those that it allows are verified; plain requests
        beside them speculate as always."""
        jobs = [*STRICT, JOBS[3], JOBS[6]]
        before = drafted(engine)

        assert [stock(job) for job in jobs] == run(engine, jobs, together=together)

        counts = since(before, drafted(engine))
        assert 0 < counts["accepted"] <= counts["draft_tokens"]

    def test_only_one_token_is_likely(self, engine, stock, recall) -> None:
        """Sampled with a top_k of 1, or a top_p of nearly nothing, the tokens are the greedy ones: drafts are held
        against each request's own parameters, beside greedy requests in one batch. On CPUs vLLM's own code compares
        with what lies in memory by chance, and a step without drafts ends the engine."""
        recall.mistakes = 0.4
        kinds = {"temperature": 1.3, "top_k": 1}, {"temperature": 0.7, "top_p": 1e-6, "seed": 1}
        jobs = [JOBS[0], *(Job(job.prompt, SamplingParams(max_tokens=60, **kind)) for job in ENDS for kind in kinds)]
        before = drafted(engine)

        said = run(engine, jobs)

        assert [stock(JOBS[0]), *(stock(job) for job in ENDS for _ in range(2))] == said
        assert since(before, drafted(engine))["accepted"] > 100

    @pytest.mark.parametrize("seed", range(3))
    def test_one_that_joins_with_one_token(self, engine, stock, recall, seed) -> None:
        """vLLM pads it with drafts that are none, which its CPU kernel takes for an index; beside drafts and beside
        none, sampled and greedy."""
        kind = {"temperature": 1.3, "top_k": 1, "frequency_penalty": 1e-9, "seed": seed}
        recall.mistakes = 0.4
        jobs = [Job(job.prompt, SamplingParams(max_tokens=job.sampling.max_tokens, **kind)) for job in JOBS]
        first = jobs[0]
        said: dict[str, list[int]] = {}
        for step in steps(engine, [jobs[6], jobs[8]], said):
            if step < 5:
                engine.llm_engine.add_request(f"join {step}", first.prompt, first.sampling)

        assert [stock(JOBS[6]), stock(JOBS[8])] == [said["0"], said["1"]]
        assert [stock(JOBS[0])] * 5 == [said[f"join {step}"] for step in range(5)]

    def test_log_probabilities(self, engine, stock, recall) -> None:
        """Every accepted token comes with the same log probabilities as without drafts."""
        (output,) = engine.generate([PROMPTS["a few"]], greedy(20, logprobs=3), use_tqdm=False)

        assert len(LOGPROBS[0]) == len(output.outputs[0].logprobs)
        for expected, actual in zip(LOGPROBS[0], output.outputs[0].logprobs, strict=True):
            assert {token: pytest.approx(value.logprob, abs=1e-3) for token, value in expected.items()} == {
                token: value.logprob for token, value in actual.items()
            }

    def test_penalties(self, engine, recall) -> None:
        """Penalties look at the drafts before: the tokens do not depend on how many are drafted."""
        jobs = [Job(PROMPTS["a few"], greedy(40, repetition_penalty=1.3, frequency_penalty=0.4, bad_words=["e"]))]
        engine.chunkllm.set({"speculative.plugin": "none"})
        plain = run(engine, jobs)
        engine.chunkllm.set({"speculative.plugin": "recall"})
        recall.mistakes = 0.3

        assert plain == run(engine, jobs)

    @pytest.mark.parametrize("kind", [{"min_p": 0.1}, {"logit_bias": {65: 1.0}}])
    def test_what_vllm_refuses(self, engine, recall, kind) -> None:
        """With speculation launched vLLM takes no min_p and no logit_bias, and says so itself."""
        with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
            engine.generate(["x"], SamplingParams(max_tokens=2, **kind), use_tqdm=False)


class TestWhileServing:
    def test_off_and_on(self, engine, stock, recall) -> None:
        """In the middle of requests: off, and no draft is asked for, nor anything fetched from the workers; on again
        with fewer, and with as many as at launch. The tokens do not change."""
        recall.mistakes = 0.2
        core = engine.llm_engine.engine_core.engine_core
        jobs, widths = [JOBS[0], JOBS[1], JOBS[6], JOBS[7]], set()
        said: dict[str, list[int]] = {}
        for step in steps(engine, jobs, said):
            if step == 4:
                engine.chunkllm.set({"speculative.plugin": "none"})
                assert not core.check_for_draft_tokens
                recall.steps.clear()
            elif step == 14:
                assert [] == recall.steps
                engine.chunkllm.set({"speculative.plugin": "recall", "speculative.tokens": 2})
                assert core.check_for_draft_tokens
            elif step == 20:
                widths = {most for _, most in recall.steps}
                engine.chunkllm.set({"speculative.tokens": WIDEST})

        assert [stock(job) for job in jobs] == [said[str(number)] for number in range(len(jobs))]
        assert {2} == widths
        assert {2, WIDEST} == {most for _, most in recall.steps}

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"speculative.tokens": WIDEST + 1}, str(WIDEST)),
            ({"speculative.tokens": 0}, "speculative.tokens"),
            ({"speculative.plugin": "medusa"}, "medusa"),
        ],
    )
    def test_what_was_not_launched(self, engine, recall, values, words) -> None:
        """More than the launch made room for, none at all, another plugin: refused, and nothing changed."""
        before = engine.chunkllm.config()
        with pytest.raises(ControlError, match=words):
            engine.chunkllm.set(values)

        assert before == engine.chunkllm.config()

    def test_what_the_plugin_is_told(self, engine, stock, recall) -> None:
        """Of every step that only decoded how many drafts were verified and accepted, and its time from the second one
        on; nothing of prefills, and no time where one stood in between."""
        job = Job(PROMPTS["a few"], greedy(60))
        run(engine, [job])

        told = [outcome for outcome in recall.outcomes if outcome.applied]
        assert 60 - 1 == sum(len(outcome.accepted) + sum(outcome.accepted) for outcome in told)
        assert all(right <= all_ for out in told for right, all_ in zip(out.accepted, out.drafted, strict=True))
        assert 0.0 == told[0].seconds
        assert all(outcome.seconds > 0 for outcome in told[1:])

    @pytest.mark.parametrize("cut", [False, True])
    def test_the_texts_it_sees(self, engine, stock, recall, cut) -> None:
        """At every step of every request its prompt and what it has said so far, whole or from any place on, while
        drafts are in flight: with cached prefixes, prompts that are prefilled in chunks, and requests that a quota
        preempts."""
        recall.mistakes, recall.shown = 0.3, {}
        before = engine.chunkllm.status()["kv"]
        most, said = before["memory_ratio_max"], dict[str, list[int]]()
        for step in steps(engine, JOBS, said):
            if cut and step in (8, 14, 30):
                blocks = {8: 5, 14: 2, 30: 60}[step]
                engine.chunkllm.set({"kv_cache.memory_ratio": (blocks + 0.5) / (before["total"] + 1) * most})

        assert cut == (before["preempted"] < engine.chunkllm.status()["kv"]["preempted"])
        seen, shown = {name.partition("-")[0]: rows for name, rows in recall.shown.items()}, 0
        for number, job in enumerate(JOBS):
            prompt = engine.get_tokenizer()(job.prompt).input_ids
            whole, lengths = [*prompt, *stock(job)], [len(text) for text, _, _ in seen.get(str(number), ())]
            assert lengths == sorted(set(lengths))
            assert job.sampling.max_tokens < 3 or len(prompt) + 1 == lengths[0]
            for text, newest, in_parts in seen.get(str(number), ()):
                assert (whole[: len(text)], whole[len(text) - 1], True) == (text, newest, in_parts)
                shown += 1
        assert shown > 40

    def test_the_status(self, engine, recall) -> None:
        """The rank's report and the engine's status say the same."""
        run(engine, JOBS[:2])
        status = engine.chunkllm.status()
        speculation = status["speculation"]

        assert ("recall", WIDEST, WIDEST) == tuple(speculation[name] for name in ("plugin", "limit", "launched"))
        assert status["workers"][0]["drafts"]["drafts"] == speculation["drafts"] > 0
        assert speculation["acceptance_length"] > 1


FAULTS = {
    "raises": (lambda step: 1 / 0, "exception"),
    "exits": (lambda step: sys.exit(3), "exception"),
    "another type": (lambda step: [1, 2, 3], "malformed"),
    "another shape": (lambda step: plan(torch.zeros(len(step.request_ids) + 1, 2, dtype=torch.int64)), "malformed"),
    "fractions": (lambda step: plan(torch.rand(len(step.request_ids), 3)), "malformed"),
}


def plan(tokens: torch.Tensor) -> Any:
    from chunkllm_bridge import DraftsPlan

    return DraftsPlan(tokens=tokens)


class TestBadDrafts:
    @pytest.mark.parametrize("name", FAULTS)
    def test_no_request_pays(self, engine, stock, recall, name) -> None:
        """A plugin that fails in every call: plain decoding, every failure counted, and asked no more in the end; off
        and on again, it has another chance."""
        recall.fault, kind = FAULTS[name]
        before = drafted(engine)["drafts"]

        assert [stock(job) for job in JOBS] == run(engine, JOBS)

        (row,) = engine.chunkllm.status()["workers"][0]["plugins"]
        assert "tripped" == row["state"]
        assert row["failures"][kind] > 10
        assert before == drafted(engine)["drafts"]
        recall.fault = None
        engine.chunkllm.set({"speculative.plugin": "none"})
        engine.chunkllm.set({"speculative.plugin": "recall"})
        assert stock(JOBS[0]) == run(engine, JOBS[:1])[0]
        assert before < drafted(engine)["drafts"]

    def test_a_late_one(self, engine, stock, recall, monkeypatch) -> None:
        """Drafts that took longer than they may are thrown away."""
        host = attach._attached[worker(engine)].desk.host
        monkeypatch.setattr(host.limits, "drafts", 0.0)
        before = drafted(engine)["drafts"]

        assert [stock(job) for job in JOBS] == run(engine, JOBS)
        assert before == drafted(engine)["drafts"]

    @pytest.mark.parametrize("fill", [-1, 10**9, 511])
    def test_tokens_that_are_none(self, engine, stock, recall, fill) -> None:
        """Negative ones, those beyond the vocabulary, and one that the model never says."""
        recall.fault = lambda step: plan(torch.full((len(step.request_ids), 5), fill))

        assert [stock(job) for job in JOBS] == run(engine, JOBS)

    def test_more_than_were_asked_for(self, engine, stock, recall) -> None:
        """A chain longer than the limit is cut, not verified: the engine has no room for it."""
        recall.fault = lambda step: plan(torch.full((len(step.request_ids), 40), 65))

        assert [stock(job) for job in JOBS] == run(engine, JOBS)

    def test_our_own_mistake(self, engine, stock, recall, monkeypatch) -> None:
        """Even an exception in the bridge's own code costs drafts only, and the log says so once."""
        bridge = attach._attached[worker(engine)].drafts
        monkeypatch.setattr(bridge, "_room", lambda index, request_id: 1 / 0)

        assert [stock(job) for job in JOBS] == run(engine, JOBS)
        assert bridge.drafting.broken


class TestModel:
    def test_rows(self, engine, tiny_model) -> None:
        """The matrices as the checkpoint has them, whole or by rows; copies."""
        from safetensors.torch import load_file

        model, stored = Weights(worker(engine).model_runner), load_file(tiny_model / "model.safetensors")
        for name, key_ in (("embedding", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
            ids = torch.tensor([5, 0, 300, 5])
            assert torch.equal(stored[key_], model.rows(name))
            assert torch.equal(stored[key_][ids], model.rows(name, ids))
            model.rows(name).zero_()
            assert torch.equal(stored[key_], model.rows(name))
        assert (64, 512, torch.float32) == (model.config["hidden_size"], model.config["vocab_size"], model.dtype)
        with pytest.raises(KeyError, match="known: embedding, lm_head"):
            model.rows("layers.0")


class TestLaunch:
    """`speculative.plugin` in the spec is all it takes; before the model is loaded."""

    @pytest.fixture
    def resolve(self, process: Path, tiny_model: Path) -> Callable[..., Any]:
        launch.register()

        def resolve(wish: dict[str, Any], **options: Any) -> Any:
            args = EngineArgs(str(tiny_model), dtype="float32", additional_config={"chunkllm": wish}, **options)
            return args.create_engine_config()

        return resolve

    def test_makes_room(self, resolve) -> None:
        """As many slots as `speculative.tokens` at launch."""
        config = resolve({"speculative.plugin": "recall", "speculative.tokens": 3})

        assert drafts.is_ours(config.speculative_config)
        assert 3 == config.speculative_config.num_speculative_tokens

    @pytest.mark.parametrize(
        "wish", [{}, {"plugins": {"recall": {}}}, {"speculative.plugin": "recall", "plugin.disable": ["recall"]}]
    )
    def test_without_it_nothing_changes(self, resolve, wish) -> None:
        """No plugin named, or a disabled one: the engine is not launched to speculate."""
        assert resolve(wish).speculative_config is None

    def test_the_operators_own(self, resolve) -> None:
        """Speculation of vLLM's own is left alone, unless ours is asked for too: then both are named."""
        own = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

        assert "ngram" == resolve({}, speculative_config=own).speculative_config.method
        with pytest.raises(IncompatibleError, match=r"speculative.plugin = recall and --speculative-config"):
            resolve({"speculative.plugin": "recall"}, speculative_config=own)
        with pytest.raises(IncompatibleError, match=r"--spec-method and --spec-tokens"):
            resolve({"speculative.plugin": "recall"}, spec_method="ngram", spec_tokens=2)

    def test_pipelines(self, resolve) -> None:
        """The embedding and the head are in different processes there: refused with the reason."""
        with pytest.raises(IncompatibleError, match="--pipeline-parallel-size 2"):
            resolve({"speculative.plugin": "recall"}, pipeline_parallel_size=2)


class TestLast:
    """After these the engine is another one."""

    def test_close_gives_everything_back(self, engine, stock, recall) -> None:
        """The runner has its own functions again, and answers as before."""
        runner = worker(engine).model_runner
        wrapped = {"propose_draft_token_ids", "_input_fits_in_drafter", "_on_request_state_removed"}
        assert wrapped <= vars(runner).keys()
        assert patches.EXPAND.applied()

        attach._attached[worker(engine)].close()

        assert not wrapped & vars(runner).keys()
        assert not patches.EXPAND.applied()
        assert [stock(job) for job in JOBS] == run(engine, JOBS)


class TestRanks:
    """The very last: when an engine of two ranks ends, vLLM takes down what one in this process needs to step."""

    def test_two_of_them(self, engine, stock, recall, process, tiny_model, tmp_path, monkeypatch) -> None:
        """One rank drafts and both verify: the same tokens, with drafts accepted, off and on again. What plugins see of
        the matrices is whole on every rank."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            pytest.skip("two ranks need two cores")
        recall.save(tmp_path / "memory.pt")
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(process), *filter(None, [os.environ.get("PYTHONPATH")])]))
        sets = {
            "speculative": {"plugin": "recall", "tokens": 4},
            "plugins": {"recall": {"memory": str(tmp_path / "memory.pt"), "checkpoint": str(tiny_model)}},
        }
        options = {"plugin": "chunkllm", "plugin_set": sets, "tensor_parallel_size": 2}
        sampled = [Job(job.prompt, SamplingParams(max_tokens=60, temperature=1.3, top_k=1)) for job in ENDS]
        with started(LLM, tiny_model, **options) as llm:
            assert [stock(job) for job in JOBS] == run(llm, JOBS)
            assert [stock(job) for job in ENDS] == run(llm, sampled)
            first, second = llm.chunkllm.status()["workers"]
            llm.chunkllm.set({"speculative.plugin": "none"})
            assert [stock(job) for job in JOBS] == run(llm, JOBS)
            off = drafted(llm)
            llm.chunkllm.set({"speculative.plugin": "recall", "speculative.tokens": 2})
            assert [stock(job) for job in JOBS] == run(llm, JOBS)
            again = llm.chunkllm.status()

        assert first["drafts"]["accepted"] == first["drafts"]["draft_tokens"] > 100
        assert (0, {}) == (second["drafts"]["drafts"], second["plugins"][0]["failures"])
        assert "plan_drafts" not in second["plugins"][0]["calls"]
        assert first["drafts"]["drafts"] == off["drafts"] < again["workers"][0]["drafts"]["drafts"]
        assert again["in_step"]
