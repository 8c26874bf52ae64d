"""`chunkllm heads train`, stage by stage; each leaves files in the work folder, and a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from chunkllm_bridge import __version__
from chunkllm_bridge.common.errors import BridgeError
from chunkllm_bridge.heads import base, gather, generate, nets
from chunkllm_bridge.heads.fit import Base, Recipe, Training, train

if TYPE_CHECKING:
    from torch import Tensor

    from chunkllm_bridge.heads.generate import Asked

PLAN, STATE, FOLLOW = "plan.json", "training.pt", "follow.safetensors"
RANK = 128  # of the narrow LM head of sequential heads
SHOWN = 64  # windows that the short form is fitted to


class TrainError(BridgeError):
    """Training that cannot begin or go on."""

    exit_code = 2


@attrs.frozen(kw_only=True)
class Options:
    """What `chunkllm heads train` was told."""

    model: Path
    out: Path
    data: tuple[Path, ...] = ()
    kind: str = "sequential"
    heads: int = 4
    vocab: int = 8192
    tokens: int = 400_000  # to be generated
    length: int = 128  # tokens per prompt
    batch: int = 384  # prompts answered at once
    inner: int = 1024
    layers: int = 1
    steps: int = 4000
    rate: float = 1e-3
    seed: int = 0
    device: str = "auto"
    saved: int = 100  # steps between two saves of the state
    resume: bool = False

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".work")

    def plan(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        free = {"resume", "device", "out", "saved"}
        return json.loads(json.dumps({k: v for k, v in attrs.asdict(self).items() if k not in free}, default=str))  # type: ignore[no-any-return]


class Watch(Protocol):
    """Who is told how far it is."""

    def stage(self, name: str, total: int) -> Callable[[int, str], None]:
        """A stage of `total` units begins; call the answer with units done and a remark."""

    def note(self, text: str) -> None: ...


def run(options: Options, watch: Watch) -> dict[str, Any]:
    """Train, measure and write the heads; the facts that the file carries. Raises `BridgeError` for what people do."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    folder = base.Folder(options.model, base.working_dtype(device := _device(options.device)))
    files = _begin(options)
    _gather(options, device, folder, watch)
    training = _train(options, folder, watch)
    facts = _facts(options, training)
    _write(options, folder, training, facts)
    watch.note("measuring on held-out prompts")
    facts["acceptance"] = measure(options.out, folder, files["held"](), options.heads)
    _write(options, folder, training, facts)
    return facts


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise TrainError("--device cuda: torch finds no GPU here; use cpu or auto")
    return wanted


def _begin(options: Options) -> dict[str, Callable[[], list[Path]]]:
    """The work folder with this plan in it, and where its shards are."""
    work, plan = options.work, options.plan()
    file = work / PLAN
    if file.exists():
        if not options.resume:
            raise TrainError(f"{work} holds a run already: --resume goes on with it, or remove the folder")
        before = json.loads(file.read_text(encoding="utf-8"))
        other = [f"{key} was {before.get(key)!r}, now {plan[key]!r}" for key in plan if before.get(key) != plan[key]]
        if other:
            raise TrainError(f"{work} holds a run of another plan: {'; '.join(other)}")
    elif options.resume:
        raise TrainError(f"there is nothing to resume: {file} is missing")
    work.mkdir(exist_ok=True)
    file.write_text(json.dumps(plan, indent=2))
    return {part: lambda part=part: gather.shards(work, part) for part in ("held", "said", "read")}  # type: ignore[misc]


def _gather(options: Options, device: str, folder: base.Folder, watch: Watch) -> None:
    done = options.work / "gathered"
    if done.exists():
        return
    model, tokenizer = base.whole(options.model, device)
    open_, known = gather.from_files(options.data, tokenizer, folder.config["vocab_size"])
    count = -(-options.tokens // options.length)
    if not known and not count:
        raise TrainError("nothing to train on: --tokens is 0 and no --data row has an output")

    def watched(total: int) -> Callable[[int], None]:
        heard = watch.stage("prompts made up", total)
        return lambda tokens: heard(tokens, "")

    asked = gather.prompts(
        model,
        tokenizer,
        open_,
        options.work,
        count=count,
        batch=options.batch,
        seed=options.seed,
        watch=watched,
    )
    parts: dict[str, Sequence[Asked]] = {
        "held": gather.held(tokenizer),
        "read": known,
        "said": asked,
    }
    names = {"held": "held-out answers", "said": "answers to train on", "read": "hidden states of given answers"}
    for part, rows in parts.items():
        total = sum(len(each.output or range(options.length)) for each in rows)
        heard = watch.stage(names[part], total)
        gather.gather(
            model,
            options.work,
            {part: list(rows)},
            length=options.length,
            batch=options.batch,
            seed=options.seed,
            step=lambda _, tokens, heard=heard: heard(tokens, ""),  # type: ignore[misc]
        )
    from safetensors.torch import save_file

    from chunkllm_bridge.heads.data import Data

    vocabulary = Data.of(_shards(options)).frequent(options.vocab, folder.config["vocab_size"])
    alone = generate.follow(model, tokenizer, vocabulary)
    save_file({"vocabulary": vocabulary, "follow": alone}, options.work / FOLLOW)
    done.touch()


def _shards(options: Options) -> list[Path]:
    return [*gather.shards(options.work, "read"), *gather.shards(options.work, "said")]


def _train(options: Options, folder: base.Folder, watch: Watch) -> Training:
    from chunkllm_bridge.heads.data import Data
    from chunkllm_bridge.plugins.medusa import formats

    work = options.work
    data = Data.of(_shards(options))
    size = folder.config["vocab_size"]
    tensors = formats.read(work / FOLLOW)[1]
    vocabulary = tensors["vocabulary"]
    follow = None
    if options.kind == "sequential":  # as the file will hold it
        follow = formats.dense(formats.as_int8("follow", tensors["follow"]), "follow")
    rows = Base.of(
        *(vocabulary, size, folder.rows("embedding", vocabulary.long()), folder.rows("lm_head", vocabulary.long())),
        *(folder.dtype, follow),
    )
    shape = nets.Shape(
        kind=options.kind,
        heads=options.heads,
        hidden=folder.config["hidden_size"],
        inner=options.inner,
        layers=options.layers,
    )
    recipe = Recipe(steps=options.steps, rate=options.rate, seed=options.seed)
    watch.note(f"{len(data.tokens)} tokens to train on; draft vocabulary of {len(vocabulary)}")
    training = Training.begin(shape, recipe, rows, data)
    state = work / STATE
    if state.exists():
        training.restore(state)
    heard = watch.stage("training", options.steps)
    heard(training.step, "")

    def told(step: int, loss: float, agreed: Sequence[float]) -> None:
        heard(1, f"loss {loss:.3f}, agreed {' '.join(f'{share:.2f}' for share in agreed)}")

    train(training, state, options.saved, told)
    return training


def _facts(options: Options, training: Training) -> dict[str, Any]:
    import torch

    paths = {"model", "data"}  # of this machine, and nobody else's business
    plan = {key: value for key, value in options.plan().items() if key not in paths}
    return {
        "recipe": {**plan, **attrs.asdict(training.recipe)},
        "data": {
            "tokens": len(training.data.tokens),
            "files": [path.name for path in options.data],
            "prompts": "built in (heads/prompts.toml), then made up by the model" if options.tokens else "none",
        },
        "made_with": {"chunkllm_bridge": __version__, "torch": torch.__version__},
        "acceptance": {},
    }


def _write(options: Options, folder: base.Folder, training: Training, facts: dict[str, Any]) -> None:
    from chunkllm_bridge.plugins.medusa import formats

    tensors = tensors_of(training, folder.dtype)
    made_for = {"fingerprint": formats.fingerprint(folder), "name": options.model.resolve().name}
    formats.write(options.out, options.kind, tensors, made_for, facts)


def tensors_of(training: Training, dtype: Any) -> dict[str, Tensor]:
    """What the file holds: the largest two as int8, the others in the model's dtype."""
    from chunkllm_bridge.plugins.medusa import formats

    weights, own = training.tensors(), training.base
    tensors = {"vocabulary": own.vocabulary.int()}
    if training.shape.kind == "sequential":
        rank = min(RANK, training.shape.hidden, len(own.head))
        weights |= nets.short_form(training.given(SHOWN), own.head, rank)
        tensors |= formats.as_int8("tokens", weights.pop("tokens"))
        if own.follow is not None:
            tensors |= formats.as_int8("follow", own.follow)
    return tensors | {name: each.to(dtype) for name, each in weights.items()}


def measure(file: Path, folder: base.Folder, shards: Sequence[Path], width: int) -> dict[str, Any]:
    """Acceptance on held-out outputs, as the file's own heads draft."""
    from chunkllm_bridge.heads.evaluate import acceptance
    from chunkllm_bridge.plugins.medusa import formats

    said = [each for path in shards for each in generate.shard(path)]
    return acceptance(formats.load(file, folder), said, width)
