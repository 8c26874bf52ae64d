"""What the documents show is true: specs resolve, commands exist, files are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest

from chunkllm_bridge.cli import cli
from chunkllm_bridge.common.metrics import FAMILIES, ITL, PREFIX, REQUEST_LENGTH
from chunkllm_bridge.common.profiles import Hardware
from chunkllm_bridge.common.registry import GROUP, Registry
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.patches import Patch
from tests.support.plugins import entry_point

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
CPU = Hardware(device="cpu", name="cpu", memory_bytes=24 << 30)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, text) of each fenced block in that language."""
    for page in PAGES:
        for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S):
            yield page.name, match[1]


def commands(program: str) -> list[str]:
    lines = [line for _, text in blocks("console") for line in text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith(f"$ {program}")]


@pytest.mark.parametrize(("page", "text"), [row for row in blocks("toml") if "entry-points" not in row[1]])
def test_specs_resolve(page: str, text: str):
    """Each spec that the documents show is right as it stands."""
    registry = Registry([*entry_points(group=GROUP), entry_point("tiny_quota")])

    Spec.resolve(file=None, text=text, hardware=CPU, catalogue=registry)


@pytest.mark.parametrize(("page", "text"), list(blocks("python")))
def test_python_compiles(page: str, text: str):
    """Each Python example is a program."""
    ast.parse(text)


def test_shown_files_are_the_files():
    """A block under `<!-- file: ... -->` is that file, to the letter."""
    for page in PAGES:
        for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", page.read_text(), re.S):
            assert (ROOT / name).read_text() == text, f"{page.name} shows another {name}"


@pytest.mark.parametrize("line", commands("chunkllm"))
def test_commands_parse(line: str):
    """Each `chunkllm` command line that the documents show is understood."""
    group, arguments = cli, line.split()[1:]
    while arguments and isinstance(group, click.Group) and arguments[0] in group.commands:
        group = group.commands[arguments.pop(0)]

    assert group.make_context("chunkllm", arguments, resilient_parsing=False) is not None


def test_make_targets_exist():
    """Each make target that the documents name is in the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"[`$] ?make ([a-z-]+)", page.read_text())}

    assert named <= targets


def test_links_lead_somewhere():
    """Each relative link is a file of the repository."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_metrics_page_names_every_metric():
    """docs/operations.md names every metric family, and none that does not exist."""
    real = {PREFIX + f.name + ("_total" if f.kind == "counter" else "") for f in FAMILIES}
    real |= {PREFIX + ITL, PREFIX + REQUEST_LENGTH}
    page = (ROOT / "docs" / "operations.md").read_text()

    assert real == set(re.findall(rf"`({PREFIX}\w+)`", page))


def test_every_patch_is_complete():
    """Each record of the ledger says why it is there and when it goes."""
    from chunkllm_bridge.patches import vllm

    for patch in vllm.PATCHES:
        assert isinstance(patch, Patch) and patch.why and patch.remove_when and patch.fingerprints
