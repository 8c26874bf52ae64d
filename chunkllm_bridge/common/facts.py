"""Read a plugin's `PluginSpec` from its source text, without importing it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from chunkllm_bridge.common.abi import PluginSpec, Seam
from chunkllm_bridge.common.errors import IncompatibleError


def read_facts(name: str, reference: str) -> PluginSpec:
    """The facts of the class at `reference` ("package.module:Class").

    Raises `IncompatibleError` where there is no such source, no such class, or no literal `spec = PluginSpec(...)`.
    """
    module, _, attribute = reference.partition(":")
    path = source_of(module)
    if path is None:
        raise IncompatibleError(name, [f"module {module} is not installed (entry point {reference})"])
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise IncompatibleError(name, [f"{module} cannot be read: {error}"]) from None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return _spec_in(name, module, node)
    raise IncompatibleError(name, [f"{module} defines no class {attribute} at its top level"])


def source_of(module: str) -> Path | None:
    """The file of a module, found through the import system's finders; no package on the way is executed."""
    search: Sequence[str] | None = None
    found: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        found = _find(".".join(parts[: depth + 1]), search)
        if found is None:
            return None
        search = list(found.submodule_search_locations or ())
    origin = found.origin if found is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _find(fullname: str, search: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is not None and (found := find_spec(fullname, search, None)) is not None:
            return found if isinstance(found, ModuleSpec) else None
    return None


def _spec_in(name: str, module: str, node: ast.ClassDef) -> PluginSpec:
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="spec")], value=ast.Call() as call):
                return _evaluate(name, module, call)
            case ast.AnnAssign(target=ast.Name(id="spec"), value=ast.Call() as call):
                return _evaluate(name, module, call)
    raise IncompatibleError(name, [f"{module}:{node.name} has no `spec = PluginSpec(...)` in its body"])


def _evaluate(name: str, module: str, call: ast.Call) -> PluginSpec:
    reasons: list[str] = []
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            values[str(keyword.arg)] = _literal(keyword.value)
        except (ValueError, TypeError):  # TypeError: a dict or set of what cannot be hashed
            where = f"{module}:{keyword.value.lineno}"
            text = ast.unparse(keyword.value)
            reasons.append(f"{where}: {keyword.arg}={text} is not a literal, so it cannot be read without running it")
    if reasons:
        raise IncompatibleError(name, reasons)
    try:
        spec = PluginSpec(**values)
    except (TypeError, ValueError) as error:
        raise IncompatibleError(name, [f"{module}:{call.lineno}: {error.args[0] if error.args else error}"]) from None
    if spec.name != name:
        raise IncompatibleError(name, [f"{module}:{call.lineno} says name={spec.name!r}, the entry point {name!r}"])
    return spec


def _literal(node: ast.expr) -> object:
    """A literal, with `Seam.X` allowed inside sets, lists and tuples."""
    match node:
        case ast.Attribute(value=ast.Name(id="Seam") | ast.Attribute(attr="Seam"), attr=attr):
            if attr not in Seam.__members__:
                raise ValueError(attr)
            return Seam[attr]
        case ast.Set(elts=items) | ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_literal(item) for item in items)
        case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple"), args=[inner], keywords=[]):
            return _literal(inner)
        case _:
            return ast.literal_eval(node)
