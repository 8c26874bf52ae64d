"""One spec file, every engine: the texts with the bridge are those of the stock engine."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from scripts.parity import PROMPTS, TOKENS, ask
from scripts.serve import SPEC

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_same_texts_with_and_without(serve, smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2, float32, greedy, sixteen prompts at once: the example's spec changes no token."""
    spec = shutil.copy(SPEC, tmp_path)
    with serve(model=smollm2) as stock:
        expected = asyncio.run(ask(stock.server, PROMPTS, TOKENS))
    with serve("--plugin", "chunkllm", "--plugin-config", str(spec), model=smollm2) as bridged:
        texts = asyncio.run(ask(bridged.server, PROMPTS, TOKENS))
        status = bridged.wait_idle()

    assert expected == texts
    assert 16 == len(set(texts))
    assert 0 < status["kv"]["steps"]
