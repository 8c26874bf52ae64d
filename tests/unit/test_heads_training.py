"""`chunkllm heads`: training on a tiny model, going on after a stop, and what a person is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from chunkllm_bridge import cli  # noqa: E402
from chunkllm_bridge.heads import base, gather, generate, invent, prompts  # noqa: E402
from chunkllm_bridge.heads.base import Folder  # noqa: E402
from chunkllm_bridge.heads.train import Options, TrainError, run  # noqa: E402
from chunkllm_bridge.plugins.medusa import formats  # noqa: E402
from tests.support.heads import truncated, write_heads  # noqa: E402
from tests.support.tiny import TinyLlama, make_tiny  # noqa: E402


class Stop(Exception):
    """The machine went away."""


@attrs.define
class Quiet:
    """Watches, and stops the run when it has heard of so many units of a stage."""

    stage_name: str = ""
    after: int = 0
    heard: int = 0

    def note(self, text: str) -> None: ...

    def stage(self, name: str, total: int) -> Callable[[int, str], None]:
        def told(units: int, remark: str) -> None:
            self.heard += units
            if name == self.stage_name and self.heard >= self.after:
                raise Stop

        return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models"), TinyLlama(vocab=320, layers=1))


def options(folder: Path, out: Path, **changes: Any) -> Options:
    small = {"tokens": 3200, "length": 16, "batch": 100, "steps": 60, "inner": 32, "vocab": 128, "device": "cpu"}
    return Options(model=folder, out=out, **{**small, **changes})


@pytest.mark.parametrize("kind", ["sequential", "independent"])
def test_training_beats_chance(kind: str, folder: Path, tmp_path: Path) -> None:
    """A hundred tokens are as likely as each other to start with; trained heads are right several times as often."""
    facts = run(options(folder, tmp_path / "h.safetensors", kind=kind, rate=3e-3), Quiet())
    every = facts["acceptance"]["all"]

    assert every["chain"][0] > 0.03
    assert every["tokens_per_step"] > 1.03
    assert {"chat", "code", "lists", "story", "all"} == set(facts["acceptance"])
    assert facts["acceptance"] == formats.load(tmp_path / "h.safetensors", Folder(folder)).facts["acceptance"]


@pytest.mark.parametrize(("stage", "after"), [("answers to train on", 2000), ("training", 45)])
def test_a_stopped_run_goes_on_to_the_same_heads(stage: str, after: int, folder: Path, tmp_path: Path) -> None:
    """Stopped while the model answers, or in the middle of training: bit for bit the heads of a run in one go."""
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    every = {"steps": 50, "saved": 20}
    run(options(folder, whole, **every), Quiet())
    with pytest.raises(Stop):
        run(options(folder, parts, **every), Quiet(stage_name=stage, after=after))
    run(options(folder, parts, resume=True, **every), Quiet())
    expected, found = formats.read(whole)[1], formats.read(parts)[1]

    assert expected.keys() == found.keys()
    assert [] == [name for name in expected if not torch.equal(expected[name], found[name])]


def test_a_run_is_not_overwritten_or_mixed(folder: Path, tmp_path: Path) -> None:
    """Without --resume what is there stays; another plan does not go on with it; nothing to resume is said."""
    first = options(folder, tmp_path / "h.safetensors", steps=1, tokens=160)
    with pytest.raises(TrainError, match="nothing to resume"):
        run(attrs.evolve(first, resume=True), Quiet())
    run(first, Quiet())
    with pytest.raises(TrainError, match="--resume goes on with it, or remove the folder"):
        run(first, Quiet())
    with pytest.raises(TrainError, match="another plan: heads was 4, now 5"):
        run(attrs.evolve(first, resume=True, heads=5), Quiet())


def test_given_outputs_are_trained_on(folder: Path, tmp_path: Path) -> None:
    """Rows of token ids are read, not answered again; with --tokens 0 they are all there is."""
    file = tmp_path / "said.jsonl"
    file.write_text("\n".join(json.dumps({"p": [40, 41], "o": [42, 43, 44, 45, 46, 47, 48]}) for _ in range(5)))
    facts = run(options(folder, tmp_path / "h.safetensors", data=(file,), tokens=0, steps=2), Quiet())

    assert 35 == facts["data"]["tokens"]


def test_beyond_the_built_in_prompts_the_model_makes_some_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users' turns, each closed as the chat template closes them, no two alike; what was made up once is kept."""
    monkeypatch.setattr(gather, "training", lambda seed: prompts.training(seed)[:3])
    model, tokenizer = base.whole(folder, "cpu")
    asked: list[int] = []

    def watch(total: int) -> Callable[[int], None]:
        asked.append(total)
        return lambda tokens: None

    def made() -> list[generate.Asked]:
        many = {"count": 60, "batch": 20, "seed": 1, "watch": watch}
        return gather.prompts(model, tokenizer, [], tmp_path, **many)  # type: ignore[arg-type]

    first, again = made(), made()
    own = [each for each in first if each.group == "invented"]
    turns = [tokenizer.decode(each.tokens) for each in own]
    closed = [text for text in turns if text.endswith("<|im_end|>\n<|im_start|>assistant\n")]

    assert first == again
    assert [57 * invent.LENGTH] == asked
    assert (57, 57) == (len(own), len(set(turns)))
    assert len(closed) > 40  # the others are raw text


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["chunkllm", "heads", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def test_check_says_what_heads_are(command: Callable[..., tuple[int, str]], folder: Path, tmp_path: Path) -> None:
    """Exit code 0 and the facts, for people and for programs."""
    path = write_heads(tmp_path / "h.safetensors", folder)
    code, said = command("check", path, "--model", folder, "--json")
    facts = json.loads(said)

    assert (0, True, 4, "sequential", True) == (
        *(code, facts["ok"], facts["heads"], facts["kind"]),
        facts["verified"],
    )
    assert 0 == command("check", path, "--model", folder)[0]


def test_check_says_that_a_base_cannot_be_verified(
    command: Callable[..., tuple[int, str]], folder: Path, tmp_path: Path
) -> None:
    """Heads of the original layout are usable, with a warning."""
    path = write_heads(tmp_path / "h", folder, kind="independent", layout="original")
    code, said = command("check", path, "--model", folder)

    assert 0 == code
    assert "does not say exactly which model" in said


def test_check_refuses(command: Callable[..., tuple[int, str]], folder: Path, tmp_path: Path) -> None:
    """Exit code 2 and every reason."""
    path = truncated(tmp_path / "t.safetensors", write_heads(tmp_path / "h.safetensors", folder))
    code, said = command("check", path, "--model", folder)
    assert (2, True) == (code, "truncated" in said)
    code, said = command("check", path, "--model", tmp_path, "--json")
    assert (2, False) == (code, json.loads(said)["ok"])
    assert "config.json is missing" in said


def test_train_names_every_bad_row(command: Callable[..., tuple[int, str]], folder: Path, tmp_path: Path) -> None:
    """File, line and what is wrong with it; exit code 2."""
    rows = ['{"p": [1], "o": [999]}', "{", '{"text": "x"}', '{"p": [1], "o": [2]}']
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    code, said = command(
        *("train", "--model", folder, "--out", tmp_path / "h.safetensors"),
        *("--data", tmp_path / "d.jsonl", "--data", tmp_path / "none.jsonl"),
    )

    assert 2 == code
    assert "d.jsonl:1" in said
    assert "999 is no token of the model, whose ids are 0 to 319" in said
    assert "d.jsonl:2" in said
    assert "d.jsonl:3" in said
    assert "d.jsonl:4" not in said
    assert "none.jsonl" in said


def test_held_out_prompts_share_nothing_with_training() -> None:
    """No text, no template and no topic of theirs is trained on."""
    import tomllib

    groups = tomllib.loads(prompts.FILE.read_text())
    kinds = ("templates", "topics")
    sides = {
        part: {kind: {text for group in groups[part].values() for text in group[kind]} for kind in kinds}
        for part in ("train", "held")
    }

    assert set() == sides["train"]["templates"] & sides["held"]["templates"]
    assert set() == sides["train"]["topics"] & sides["held"]["topics"]
    assert set() == {each.text for each in prompts.training(0)} & {each.text for each in prompts.held_out()}
    assert set(prompts.HELD) == {each.group for each in prompts.held_out()}
