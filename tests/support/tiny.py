"""Tiny random Llama models: real folders that a real engine loads in a moment, the same for the same seed."""

from __future__ import annotations

import itertools
import json
import shutil
import string
from pathlib import Path

import attrs

BYTES = 256
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")  # the ids after the bytes
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECIPE = 1  # raise it when the same shape and seed would give another folder


@attrs.frozen(kw_only=True)
class TinyLlama:
    """The shape. Head size 32 is the smallest that the CPU attention of the engines takes."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 512
    context: int = 2048
    seed: int = 0

    def __str__(self) -> str:
        heads = f"{self.heads}.{self.kv_heads}.{self.head_dim}"
        return f"llama-{self.layers}x{self.hidden}-{heads}-v{self.vocab}-c{self.context}-seed{self.seed}-r{RECIPE}"


def make_tiny(root: Path, shape: TinyLlama | None = None) -> Path:
    """The folder of that shape under `root`; made if it is not there, complete or not at all."""
    shape = shape or TinyLlama()
    folder = root / str(shape)
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_tokenizer(partial, shape)
        _write_model(partial, shape)
        partial.rename(folder)
    return folder


def _write_tokenizer(folder: Path, shape: TinyLlama) -> None:
    """One token per byte: every text can be said, and the number of tokens is the number of bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": shape.context,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _alphabet() -> list[str]:
    """How the byte-level scheme writes each byte: itself where that is printable, else the next free character."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte if byte in plain else next(spare)) for byte in range(BYTES)]


def _write_model(folder: Path, shape: TinyLlama) -> None:
    """Weights large enough that greedy text wanders; the head speaks printable ASCII only.

    So equal text means equal tokens, no text ends early, and no character is half sent.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        pad_token_id=BYTES,
        bos_token_id=BYTES + 1,
        eos_token_id=BYTES + 2,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    random = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # norms stay at one
                weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[1] ** -0.5 * 1.5, generator=random)
        spoken = [ord(character) for character in string.printable if character.isprintable()]
        silent = sorted(set(range(shape.vocab)) - set(spoken))
        model.lm_head.weight[silent] = 0.0
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id, bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id
    )
    model.save_pretrained(folder)
