"""SGLang on the CPU platform gives the tokens of transformers, and says no in time to what needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch

from chunkllm_bridge.sglang import platform
from chunkllm_bridge.sglang.torch_cpu import compiler, defaults, packed, refusals
from chunkllm_bridge.sglang.torch_cpu.pieces import Entry, Exit, Rotation, Shape, make_pieces

PROMPTS = ["hello", "the quick brown fox " * 12, "a", "chunk " * 40, "x y z", "12345", "m" * 130, "hello again"]
TOKENS = 12

SCRIPT = """
import json, sys
import sglang
if __name__ == "__main__":
    wish = json.loads(sys.argv[1])
    engine = sglang.Engine(mem_fraction_static=0.5, max_total_tokens=4096, log_level="warning", **wish["engine"])
    sampling = {"temperature": 0, "max_new_tokens": wish["tokens"], "ignore_eos": True}
    rounds = [engine.generate(wish["prompts"], sampling) for _ in range(2)]
    print("\\nRESULT" + json.dumps([[[o["output_ids"], o["meta_info"]["cached_tokens"]] for o in r] for r in rounds]))
    engine.shutdown()
"""


def served(model: Path, tmp_path: Path, *, compiled: bool, prompts: list[str], **engine: Any) -> list[Any]:
    """Two rounds of [ids, cached tokens] per prompt, from an engine in a process of its own."""
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    wish = json.dumps({"engine": {"model_path": str(model), **engine}, "prompts": prompts, "tokens": TOKENS})
    done = subprocess.run(
        [sys.executable, str(script), wish],
        env=os.environ | {compiler.SWITCH: str(int(compiled))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return list(json.loads(lines[0].removeprefix("RESULT")))


def expected(model: Path, prompts: list[str]) -> list[list[int]]:
    """Greedy tokens of transformers in float32, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = network.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "engine"),
    [
        (False, {"page_size": 16, "chunked_prefill_size": 64}),
        (True, {"page_size": 1}),
        (False, {"tp_size": 2}),
    ],
    ids=["pages and chunks", "compiled", "two ranks"],
)
def test_tokens_are_those_of_transformers(
    tiny_model: Path, tmp_path: Path, compiled: bool, engine: dict[str, Any]
) -> None:
    """In float32: prompts of mixed lengths at once, longer than a chunk, and again out of the radix cache."""
    first, again = served(tiny_model, tmp_path, compiled=compiled, prompts=PROMPTS, dtype="float32", **engine)

    assert expected(tiny_model, PROMPTS) == [ids for ids, _ in first]
    assert [ids for ids, _ in first] == [ids for ids, _ in again]
    assert any(cached for _, cached in again)


@pytest.mark.engine
@pytest.mark.slow
def test_a_real_model_in_compiled_pieces(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 in float32, thirty layers through one compiled piece."""
    prompts = ["The capital of France is", "Once upon a time", "1 2 3 4 5 6 7"]
    first, _ = served(smollm2, tmp_path, compiled=True, prompts=prompts, dtype="float32", context_length=512)

    assert expected(smollm2, prompts) == [ids for ids, _ in first]


def test_pieces_are_a_llama_layer() -> None:
    """Two layers in pieces, on one rank and on two, against the same arithmetic written out."""
    torch.manual_seed(0)
    shape = Shape(heads=2, kv_heads=1, head_dim=4, eps=1e-5)
    entry = Entry(torch.rand(8), torch.randn(16, 8), None)
    exit = Exit(torch.randn(8, 8), torch.rand(8), torch.randn(12, 8), torch.randn(8, 6))
    rotation = Rotation(torch.ones(3, 1, 4), torch.zeros(3, 1, 4))
    attention, residual = torch.randn(3, 8), torch.randn(3, 8)
    linear = torch.nn.functional.linear

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)

    middle = residual + linear(attention, exit.out)
    gate, up = linear(normed(middle, exit.norm), exit.gate_up).chunk(2, -1)
    after = middle + linear(torch.nn.functional.silu(gate) * up, exit.down)
    qkv = linear(normed(after, entry.norm), entry.qkv)

    whole = make_pieces(shape, linear, None).between(attention, residual, exit, entry, rotation)
    halves = make_pieces(shape, linear, None, lambda update: update).between(attention, residual, exit, entry, rotation)

    torch.testing.assert_close(torch.cat(whole[:3], -1), qkv)
    torch.testing.assert_close(whole[3], after)
    torch.testing.assert_close(whole, halves)


def test_packed_weights_follow_their_source() -> None:
    """A packed product is the plain one, and that of new values once packed anew."""
    weight, x = torch.randn(64, 32).bfloat16(), torch.randn(5, 32).bfloat16()
    if not packed.can_pack([weight]):
        pytest.skip("no oneDNN kernels for bfloat16 here")
    product = packed.linear()
    packed.pack([weight])
    torch.testing.assert_close(product(x, weight), torch.nn.functional.linear(x, weight))
    weight.neg_()
    packed.pack([weight])
    torch.testing.assert_close(product(x, weight), torch.nn.functional.linear(x, weight))
    packed.unpack([weight])
    torch.testing.assert_close(product(x, weight), torch.nn.functional.linear(x, weight))


def test_active_on_a_bare_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator, or SGLang's own CPU engine, keep the platform away."""
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert "chunkllm_bridge.sglang.platform.TorchCpuPlatform" == platform.activate()

    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert platform.activate() is None


@pytest.fixture
def arguments() -> Callable[..., SimpleNamespace]:
    """Launch parameters as SGLang hands them over, with what the user has said."""

    def make(**said: Any) -> SimpleNamespace:
        unsaid = dict.fromkeys((*refusals.ATTENTION, "device", "sampling_backend", "quantization", "lora_paths"))
        rest = {"speculative_algorithm": None, "enable_torch_compile": False, "enable_lora": False, "lora_backend": ""}
        return SimpleNamespace(**{**unsaid, **rest, "tp_size": 1, "pp_size": 1, "dp_size": 1} | said)

    return make


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device cuda", {"device": "cuda"}),
        ("--attention-backend flashinfer", {"attention_backend": "flashinfer"}),
        ("--decode-attention-backend triton", {"decode_attention_backend": "triton"}),
        ("--sampling-backend flashinfer", {"sampling_backend": "flashinfer"}),
        ("--quantization awq", {"quantization": "awq"}),
        ("--speculative-algorithm NGRAM", {"speculative_algorithm": "NGRAM"}),
        ("--speculative-algorithm EAGLE", {"speculative_algorithm": "EAGLE"}),
        ("--enable-torch-compile", {"enable_torch_compile": True}),
        ("--lora-backend csgmv", {"enable_lora": True, "lora_backend": "csgmv"}),
        ("4 ranks", {"tp_size": 4}),
    ],
)
def test_what_needs_a_gpu_is_refused(arguments: Callable[..., Any], words: str, said: dict[str, Any]) -> None:
    """With the flag as written, and what to do instead."""
    (reason,) = refusals.reasons_against(arguments(**said), cores=2)

    assert reason.startswith(words)
    assert ";" in reason or ":" in reason


def test_all_reasons_at_once(arguments: Callable[..., Any]) -> None:
    """A launch is refused once, not once per mistake."""
    with pytest.raises(refusals.CannotServeError) as refused:
        refusals.check(arguments(device="cuda", attention_backend="fa3"))

    assert 2 == len(refused.value.reasons)
    assert [] == refusals.reasons_against(arguments(attention_backend="torch_native"), cores=2)


def test_ranks_get_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has said which cores, or one rank has them all."""
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8})
    defaults.bind_ranks(1)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ
    defaults.bind_ranks(2)
    assert "0,1|2,3" == os.environ["SGLANG_CPU_OMP_THREADS_BIND"]
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "8|0")
    defaults.bind_ranks(2)
    assert "8|0" == os.environ["SGLANG_CPU_OMP_THREADS_BIND"]


@pytest.mark.parametrize(("expected", "text"), [({0}, "0"), ({0, 1, 2, 5}, "0-2,5"), ({3, 4}, "3,4")])
def test_cores_are_read_as_sglang_writes_them(expected: set[int], text: str) -> None:
    """Single ones and ranges."""
    assert expected == defaults._cores(text)


def test_without_a_compiler_the_pieces_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do when switched off; a switch that says neither is an error."""
    assert compiler.compiler({compiler.SWITCH: "0"}) is None
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert compiler.compiler({}) is None
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        compiler.compiler({compiler.SWITCH: "maybe"})
