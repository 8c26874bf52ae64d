"""Files of draft heads: what can be read, and what a person is told where one cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from chunkllm_bridge.heads.base import Folder  # noqa: E402
from chunkllm_bridge.plugins.medusa import formats  # noqa: E402
from chunkllm_bridge.plugins.medusa.formats import HeadsError  # noqa: E402
from tests.support.heads import (  # noqa: E402
    LAYOUTS,
    changed_model,
    shifted,
    truncated,
    with_nan,
    write_heads,
    write_own,
)
from tests.support.tiny import TinyLlama, make_tiny  # noqa: E402

SHAPE = TinyLlama(vocab=320)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models"), SHAPE)


@pytest.fixture(scope="module")
def sound(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads(tmp_path_factory.mktemp("heads") / "sound.safetensors", folder)


def refused(path: Path, model: Path) -> str:
    with pytest.raises(HeadsError) as caught:
        formats.load(path, Folder(model))
    assert caught.value.reasons
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_same_drafts(layout: str, folder: Path, tmp_path: Path) -> None:
    """The same independent heads draft the same tokens from our file, the original's two and vLLM's."""
    ours = write_heads(tmp_path / "ours.safetensors", folder, kind="independent")
    name = "heads.safetensors" if layout == "own" else "heads"
    theirs = write_heads(tmp_path / name, folder, kind="independent", layout=layout)
    base = Folder(folder)
    hidden, last = torch.randn(5, SHAPE.hidden), torch.arange(5)
    expected = formats.load(ours, base).chain(hidden, last, 4)
    heads = formats.load(theirs, base)

    assert expected.tolist() == heads.chain(hidden, last, 4).tolist()
    assert (4, "independent", layout == "own") == (heads.count, heads.kind, heads.verified)


def test_a_token_map_is_the_draft_vocabulary(folder: Path, tmp_path: Path) -> None:
    """vLLM's truncated layout drafts the mapped tokens only."""
    path = write_heads(tmp_path / "heads", folder, kind="independent", layout="vllm", candidates=40)
    heads = formats.load(path, Folder(folder))

    assert 40 == heads.candidates
    assert int(heads.chain(torch.randn(64, SHAPE.hidden), torch.zeros(64).long(), 4).max()) < 40


def test_a_file_says_what_it_is(folder: Path, sound: Path) -> None:
    """The header is read back as the facts of the heads."""
    heads = formats.load(sound, Folder(folder))

    assert {"kind": "sequential", "heads": "4", "base_model": folder.name, "data": "none, random"}.items() <= (
        dict(heads.facts).items()
    )
    assert heads.verified
    assert heads.nbytes > 0


def test_int8_is_near(folder: Path, tmp_path: Path) -> None:
    """A tensor stored as int8 comes back within half a step of its row's scale."""
    tensor = torch.randn(6, 50)
    stored = formats.as_int8("x", tensor)
    error = (stored["x"].float() * stored["x.scale"][:, None] - tensor).abs()

    assert bool((error <= stored["x.scale"][:, None] * 0.5001).all())


def test_the_fingerprint_is_that_of_the_model(folder: Path, tmp_path: Path) -> None:
    """The same in float32 and bfloat16 for a bfloat16 checkpoint; another for another embedding under that name."""
    from safetensors.torch import load_file, save_file

    low = tmp_path / "low"
    changed_model(low, folder)
    file = low / "model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    expected = formats.fingerprint(Folder(low, torch.float32))

    assert expected == formats.fingerprint(Folder(low, torch.bfloat16))
    assert expected != formats.fingerprint(Folder(folder))


def test_heads_of_another_model_are_refused(folder: Path, sound: Path, tmp_path: Path) -> None:
    """Also when the model was changed under the same shape; both fingerprints and the way out are named."""
    other = changed_model(tmp_path / folder.name, folder)
    text = refused(sound, other)

    assert "in step with the model" in text
    assert formats.fingerprint(Folder(folder))[:12] in text
    assert formats.fingerprint(Folder(other))[:12] in text
    assert "chunkllm heads train" in text


def test_heads_of_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    """Layouts without a fingerprint are told by their shapes; each misfit is named."""
    other = make_tiny(tmp_path, TinyLlama(vocab=320, hidden=96))
    path = write_heads(tmp_path / "heads", other, kind="independent", layout="original")
    text = refused(path, folder)

    assert "block 0 of head 3: weight is (96, 96), where this model's heads need (64, 64)" in text
    assert "LM head of head 0 is (320, 96)" in text


@pytest.mark.parametrize("layout", ["original", "vllm"])
def test_an_unknown_tensor_is_refused(layout: str, folder: Path, tmp_path: Path) -> None:
    """A key that no layout has is named: it would be a part of the heads that nobody computes."""
    from safetensors.torch import load_file, save_file

    path = write_heads(tmp_path / "heads", folder, kind="independent", layout=layout)
    (file,) = path.glob("*.safetensors")
    save_file({**load_file(file), "attention.q.weight": torch.zeros(1)}, file)

    assert "attention.q.weight is unknown here" in refused(path, folder)


def break_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["outs"] = tensors["outs"][..., :-1].contiguous()


def break_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    tensors["vocabulary"][0] = SHAPE.vocab + 5


def repeat_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    tensors["vocabulary"][0] = tensors["vocabulary"][1]


def add_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["more"] = torch.zeros(2)


def drop_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["states"]


def infinite_and_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["states"].view(-1)[:3] = float("inf")
    tensors["outs"].view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (break_shape, ["outs is (4, 1, 64, 31), where this model's heads need (4, 1, 64, 32)"]),
        (break_vocabulary, ["vocabulary names tokens from 1 to 325, and the model has 0 to 319"]),
        (repeat_vocabulary, ["vocabulary names a token twice"]),
        (add_tensor, ["more is unknown here"]),
        (drop_tensor, ["states is missing"]),
        (infinite_and_nan, ["states holds 3 values that are NaN or infinite", "outs holds 1 values"]),
    ],
)
def test_damage_is_named(
    harm: Callable[[dict[str, torch.Tensor]], None], words: list[str], folder: Path, sound: Path, tmp_path: Path
) -> None:
    """Every reason, with the tensor's name and both numbers."""
    tensors = formats.read(sound)[1]
    harm(tensors)
    path = tmp_path / "broken.safetensors"
    write_own(path, "sequential", tensors, Folder(folder))
    text = refused(path, folder)

    assert [] == [word for word in words if word not in text]


def test_nan_and_truncation(folder: Path, sound: Path, tmp_path: Path) -> None:
    """A NaN is named by tensor; half a file is told as truncated."""
    assert "biases holds 1 values" in refused(with_nan(tmp_path / "nan.safetensors", sound), folder)
    assert "truncated" in refused(truncated(tmp_path / "half.safetensors", sound), folder)


def test_a_pickle_is_not_run(folder: Path, tmp_path: Path) -> None:
    """A .pt file with more than weights in it is refused, and its code stays unexecuted."""
    witness = tmp_path / "ran"

    class Code:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return (eval, (f"__import__('pathlib').Path({str(witness)!r}).touch()",))

    path = write_heads(tmp_path / "heads", folder, kind="independent", layout="original-pt")
    torch.save({"0.0.linear.weight": Code()}, path / "medusa_lm_head.pt")

    assert "is not run" in refused(path, folder)
    assert not witness.exists()


def test_what_is_not_there(folder: Path, sound: Path, tmp_path: Path) -> None:
    """A missing file, an empty folder, a config without weights, a config that is none."""
    assert "there is no such file or folder" in refused(tmp_path / "nothing", folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json, and 0 files of our own layout" in refused(empty, folder)
    (empty / "config.json").write_text("{}")
    assert "holds none of medusa_lm_head.safetensors, model.safetensors" in refused(empty, folder)
    broken = write_heads(tmp_path / "broken", folder, kind="independent", layout="vllm")
    (broken / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(broken, folder)


def test_fewer_heads_than_the_config_says(folder: Path, tmp_path: Path) -> None:
    """config.json and weights must agree."""
    path = write_heads(tmp_path / "heads", folder, kind="independent", layout="vllm", heads=2)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_heads": 3}))

    assert "config.json says 3 heads, and there are 2" in refused(path, folder)


def test_a_folder_with_one_of_our_files(folder: Path, sound: Path) -> None:
    """May be named instead of the file."""
    assert 4 == formats.load(sound.parent, Folder(folder)).count


def test_shifted_heads_load(folder: Path, tmp_path: Path) -> None:
    """What they do wrong no file can tell: they draft the token that the state gave, one place behind."""
    base = Folder(folder)
    heads = formats.load(shifted(tmp_path / "s.safetensors", folder), base)
    hidden = torch.randn(3, SHAPE.hidden)
    given = (hidden @ base.rows("lm_head").T).argmax(-1)

    assert given.tolist() == heads.chain(hidden, given, 1)[:, 0].tolist()


def test_the_shipped_heads_are_whole() -> None:
    """Five sequential heads in at most 13 MB, finite, with the recipe and the acceptance measured in the header."""
    from chunkllm_bridge.plugins.medusa.plugin import SHIPPED

    (path,) = SHIPPED.glob("*.safetensors")
    metadata, tensors = formats.read(path)
    facts = json.loads(metadata["facts"])

    assert ("sequential", "5", 64) == (metadata["kind"], metadata["heads"], len(metadata["base_fingerprint"]))
    assert {"recipe", "data", "acceptance"} <= facts.keys()
    assert facts["acceptance"]["all"]["tokens_per_step"] > 1.5
    assert path.stat().st_size <= 13_000_000
    assert [] == formats.not_finite(tensors)
