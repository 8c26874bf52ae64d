"""Imports point down (cli -> vllm, sglang -> patches -> common; plugins -> the face), and importing has no effects."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "chunkllm_bridge"
ENGINES = ("vllm", "sglang")
FACE = "__init__"


@attrs.frozen
class Import:
    """One import statement's target, and how it stands there."""

    module: str
    line: int
    top: bool  # executed when the module is imported
    typing: bool  # under `if TYPE_CHECKING`


def imports(source: str, package: str = "") -> Iterator[Import]:
    yield from _imports(ast.parse(source), package, top=True, typing=False)


def _imports(node: ast.AST, package: str, *, top: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (Import(alias.name, child.lineno, top, typing) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                whole = ".".join([*base, *([module] if module else [])])
                yield Import(whole, child.lineno, top, typing)
                yield from (Import(f"{whole}.{alias.name}", child.lineno, top, typing) for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, package, top=False, typing=typing)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for statement in child.body:
                    yield from _imports(ast.Module([statement], []), package, top=top, typing=True)
                for statement in child.orelse:
                    yield from _imports(ast.Module([statement], []), package, top=top, typing=typing)
            case _:
                yield from _imports(child, package, top=top, typing=typing)


def room(path: Path) -> str:
    """The top-level part of the package that a file belongs to: "common", "vllm", "cli", ..."""
    return path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def allowed(inside: str, target: str) -> bool:
    """Whether a room may import another of the package."""
    below = {
        FACE: {"common"},
        "common": {"common", FACE},
        "patches": {"patches", "common", FACE},
        "plugins": {FACE},
        "heads": {"heads", "plugins", "common", FACE},
        "cli_heads": {"cli_heads", "cli", "heads", "plugins", "common", FACE},
        "cli": {"cli", "cli_heads", "client", *ENGINES, "patches", "common", FACE},
        "client": {"client", "common", FACE},
        **{engine: {engine, "patches", "common", FACE} for engine in ENGINES},
    }
    return target in below[inside]


FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


def targets(path: Path) -> Iterator[tuple[str, Import]]:
    """The rooms of our own package that a file imports; the bare package is its face."""
    for found in imports(path.read_text(), package_of(path)):
        parts = found.module.split(".")
        if parts[0] != PACKAGE:
            continue
        inner = parts[1] if len(parts) > 1 else FACE
        is_room = (ROOT / PACKAGE / inner).is_dir() or (ROOT / PACKAGE / f"{inner}.py").is_file()
        yield (inner if is_room else FACE), found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """cli -> vllm, sglang -> patches -> common; plugins import the face only; the engines never each other.

    The face may be imported by `common` for its version; it defines nothing that could come back. A plugin of several
    files imports those of its own package.
    """
    own = package_of(path) if room(path) == "plugins" and len(path.relative_to(ROOT).parts) > 3 else None
    wrong = [
        f"line {found.line}: {found.module}"
        for target, found in targets(path)
        if not allowed(room(path), target) and not (own and f"{found.module}.".startswith(f"{own}."))
    ]

    assert [] == wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_engines_are_imported_in_their_rooms_only(path: Path) -> None:
    """`import vllm` under chunkllm_bridge/vllm, `import sglang` under chunkllm_bridge/sglang, nowhere else."""
    roots = [found for found in imports(path.read_text(), package_of(path)) if found.module.split(".")[0] in ENGINES]

    assert [] == [f"line {found.line}: {found.module}" for found in roots if found.module.split(".")[0] != room(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_is_for_typing(path: Path) -> None:
    """Only `reference.py` and the engines' rooms import torch when they are imported; others where they use it, or to
    name types."""
    found = [
        f"line {each.line}"
        for each in imports(path.read_text(), package_of(path))
        if each.module.split(".")[0] == "torch" and each.top and not each.typing
    ]

    assert [] == found or path.name == "reference.py" or room(path) in ENGINES


def test_the_face_is_all_that_an_author_needs() -> None:
    """Everything it names it exports."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    named = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    (exported,) = (node.value for node in tree.body if ast.unparse(node).startswith("__all__ ="))

    assert named == set(ast.literal_eval(exported))


@pytest.mark.parametrize(
    "module",
    [
        PACKAGE,
        f"{PACKAGE}.cli",
        f"{PACKAGE}.common.testing",
        f"{PACKAGE}.common.conformance",
        f"{PACKAGE}.common.launching",
        f"{PACKAGE}.common.routes",
    ],
)
def test_importing_has_no_effects(module: str) -> None:
    """No engine, no torch, no web framework, no logging set up, no environment changed."""
    script = (
        "import logging, os, sys\n"
        "before = dict(os.environ)\n"
        f"import {module}\n"
        "slow = {'torch', 'vllm', 'sglang', 'transformers', 'fastapi'}\n"
        "heavy = sorted({name.split('.')[0] for name in sys.modules} & slow)\n"
        "print(heavy, logging.getLogger().handlers, logging.getLogger('chunkllm').handlers, before == dict(os.environ))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert "[] [] [] True" == done.stdout.strip()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", [("torch", True, False)]),
        ("def f():\n    import torch", [("torch", False, False)]),
        ("try:\n    import torch\nexcept ImportError: ...", [("torch", True, False)]),
        ("class A:\n    import torch", [("torch", True, False)]),
        (
            "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy",
            [("torch", True, True), ("numpy", True, False)],
        ),
        ("from ..vllm import blocks", [("a.vllm", True, False), ("a.vllm.blocks", True, False)]),
        ("from . import x", [("a.b", True, False), ("a.b.x", True, False)]),
        ("from vllm.v1 import core", [("vllm.v1", True, False), ("vllm.v1.core", True, False)]),
    ],
)
def test_the_graph_sees_every_kind_of_import(source: str, expected: list[tuple[str, bool, bool]]) -> None:
    """A rule that looks past an import would hold nothing."""
    assert expected == [(found.module, found.top, found.typing) for found in imports(source, "a.b")]
