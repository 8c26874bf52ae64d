"""`chunkllm heads`: train draft heads for a model, and check a file of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from chunkllm_bridge.common.errors import BridgeError, ControlError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from chunkllm_bridge.heads.train import Watch

FOLDER = click.Path(path_type=Path)
REMARK = 10.0  # seconds between two lines of progress where there is no terminal


@click.group()
def heads() -> None:
    """Draft heads for speculative decoding (plugin medusa): train them for a model, check a file of them."""


@heads.command("train")
@click.option("--model", required=True, type=FOLDER, help="The model's folder.")
@click.option("--out", required=True, type=FOLDER, help="The file to write; what is in between stays in OUT.work.")
@click.option("--data", multiple=True, type=FOLDER, help="JSONL of prompts, or of prompts and outputs as token ids.")
@click.option("--kind", type=click.Choice(["sequential", "independent"]), default="sequential", show_default=True)
@click.option("--heads", "count", type=click.IntRange(1, 16), default=4, show_default=True, help="The longest draft.")
@click.option("--vocab", type=click.IntRange(2), default=8192, show_default=True, help="Tokens that may be drafted.")
@click.option("--tokens", type=click.IntRange(0), default=400_000, show_default=True, help="To let the model say.")
@click.option("--length", type=click.IntRange(2), default=128, show_default=True, help="Tokens per prompt.")
@click.option("--batch", type=click.IntRange(1), default=384, show_default=True, help="Prompts answered at once.")
@click.option("--inner", type=click.IntRange(8), default=1024, show_default=True, help="Width of sequential heads.")
@click.option("--layers", type=click.IntRange(1, 8), default=1, show_default=True, help="Layers of a head.")
@click.option("--steps", type=click.IntRange(1), default=4000, show_default=True, help="Training steps.")
@click.option("--rate", type=click.FloatRange(1e-6, 1.0), default=1e-3, show_default=True, help="Learning rate.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON at the end.")
def heads_train(model: Path, out: Path, data: tuple[Path, ...], count: int, as_json: bool, **rest: Any) -> None:
    """Train heads on what the model itself says, and report how many of their drafts it accepts."""
    with _engine_environment():
        from chunkllm_bridge.heads.train import Options, run

        with _watch() as watch:
            facts = run(Options(model=model, out=out, data=data, heads=count, **rest), watch)
    _show(out, facts, as_json)


@heads.command("check")
@click.argument("file", type=FOLDER)
@click.option("--model", required=True, type=FOLDER, help="The folder of the model that they are to draft for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def heads_check(file: Path, model: Path, as_json: bool) -> None:
    """Whether a file of heads fits a model; every reason if it does not, and exit code 2."""
    with _engine_environment():
        from chunkllm_bridge.heads.base import Folder
        from chunkllm_bridge.plugins.medusa import formats

        try:
            found = formats.load(file, Folder(model))
        except formats.HeadsError as error:
            raise ControlError(str(error), 422, error.reasons) from None
    facts = {
        "verified": found.verified,
        "heads": found.count,
        "kind": found.kind,
        "candidates": found.candidates,
        "bytes": found.nbytes,
    }
    _show(file, {**found.facts, **facts}, as_json)


def _show(file: Path, facts: Mapping[str, Any], as_json: bool) -> None:
    from chunkllm_bridge.cli import out, show_json, table, warn

    if as_json:
        show_json({"ok": True, "file": str(file), **facts})
        return
    plain = [(key, value) for key, value in facts.items() if not isinstance(value, Mapping)]
    if plain:
        table(str(file), ("fact", "value"), plain)
    rows = [
        (group, *(figures[key] for key in ("tokens_per_step", "per_head", "chain", "covered", "places")))
        for group, figures in (facts.get("acceptance") or {}).items()
    ]
    if rows:
        columns = ("prompts", "tokens per step", "per head", "chain", "covered", "places")
        table("Acceptance on held-out prompts, greedy", columns, rows)
    if facts.get("verified") is False:
        warn(["this layout does not say exactly which model it was made for; shapes fit, the rest cannot be checked"])
    out.print(f"{file}: usable", markup=False)


@contextmanager
def _engine_environment() -> Iterator[None]:
    """torch and transformers come with an engine; the bridge alone has neither."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "safetensors", "numpy"):
            raise
        text = f"this needs {error.name}, which is not installed here: run it in the environment of an engine"
        raise BridgeError(text) from None


class _Bars:
    """Progress as bars on a terminal, as a line now and then elsewhere."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress

    def note(self, text: str) -> None:
        self._console.print(escape(text), highlight=False)

    def stage(self, name: str, total: int) -> Callable[[int, str], None]:
        task: TaskID = self._progress.add_task(name, total=max(total, 1), remark="")
        said = time.monotonic()
        done = 0

        def heard(units: int, remark: str) -> None:
            nonlocal said, done
            done += units
            self._progress.update(task, advance=units, remark=remark)
            if not self._console.is_terminal and (time.monotonic() - said > REMARK or done >= total):
                said = time.monotonic()
                self.note(f"{name}: {done} of {total} {remark}")

        return heard


@contextmanager
def _watch() -> Iterator[Watch]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *(TimeRemainingColumn(), TextColumn("{task.fields[remark]}")),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Bars(console, progress)
