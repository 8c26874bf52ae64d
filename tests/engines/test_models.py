"""The model folders that the engine tests stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import TinyLlama, make_tiny


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_tiny_models_are_the_same_for_the_same_seed(tmp_path: Path):
    """Two machines that make the tiny model test against the same weights; another seed is another model."""
    one, again = make_tiny(tmp_path / "one"), make_tiny(tmp_path / "again")

    assert content(one) == content(again)
    assert content(one) != content(make_tiny(tmp_path / "other", TinyLlama(seed=1)))


def test_tiny_tokens_are_bytes(tiny_model: Path):
    """The tiny model's tokens are the bytes of the text, so a test can count them without asking."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    assert list("Grüße,\n 12".encode()) == tokenizer.encode("Grüße,\n 12")


def test_tiny_text_wanders_in_ascii(tiny_model: Path):
    """Greedy text of the tiny model is printable, does not end early, and differs from prompt to prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    texts = set()
    for prompt in (b"Hello", b"The capital of France is", b"aaaa"):
        out = model.generate(torch.tensor([list(prompt)]), max_new_tokens=48, do_sample=False)[0, len(prompt) :]
        texts.add(bytes(out.tolist()).decode("ascii"))

    assert 3 == len(texts)
    assert all(48 == len(text) and text.isprintable() and len(set(text)) > 12 for text in texts)


@pytest.mark.slow
def test_real_model_answers_and_stops(smollm2: Path):
    """The de-quantised model, asked through its chat template, knows Paris and ends its turn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**asked, max_new_tokens=40, do_sample=False)[0, asked["input_ids"].shape[1] :]

    assert "The capital of France is Paris.<|im_end|>" == tokenizer.decode(out)


def test_real_tokenizer_cuts_as_in_training(smollm2: Path):
    """Digits stand alone, and the line breaks before one stay together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    assert ["ĊĊ", "1", "2", ".", "ĠA"] == tokenizer.tokenize("\n\n12. A")
