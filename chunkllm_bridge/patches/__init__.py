"""The ledger of engine symbols that we wrap or lean on where the engine offers no seam.

A patch is a record; applying it returns the way back. `probe` compares the installed symbol with the one that was read.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import attrs

from chunkllm_bridge.common.errors import PatchError

Undo = Callable[[], None]


@attrs.frozen(kw_only=True)
class Probe:
    """What a patch found at its target."""

    target: str
    status: str  # "present", "changed" (the source is not the one read), "missing" (gone, or other parameters)
    detail: str = ""
    capability: str = ""

    @property
    def usable(self) -> bool:
        return self.status != "missing"


@attrs.frozen(kw_only=True)
class Patch:
    """One engine symbol, what we expect of it, why we need it, and when this record can go."""

    target: str  # "package.module:Class.method"
    parameters: tuple[str, ...] = ()  # the parameter names that we rely on
    fingerprints: tuple[str, ...] = ()  # of the source texts that we read; empty: the signature is all that matters
    capability: str  # what is lost without it
    wraps: bool = True  # False: called or read by us, never replaced
    why: str
    remove_when: str

    def locate(self) -> tuple[Any, str, Any]:
        """(owner, attribute name, the attribute as stored). Raises `PatchError` when it is not there."""
        module, _, qualname = self.target.partition(":")
        try:
            owner: Any = importlib.import_module(module)
            *path, name = qualname.split(".")
            for part in path:
                owner = getattr(owner, part)
            return owner, name, inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{self.target}: {error}") from error

    def probe(self) -> Probe:
        try:
            _, _, stored = self.locate()
        except PatchError as error:
            return self._found("missing", str(error))
        function = inspect.unwrap(getattr(stored, "__func__", stored))
        if inspect.isfunction(function):
            has = set(inspect.signature(function).parameters)
            if lost := [name for name in self.parameters if name not in has]:
                return self._found("missing", f"no parameter {', '.join(lost)} (it has {', '.join(sorted(has))})")
        if self.fingerprints and (now := fingerprint(function)) not in self.fingerprints:
            return self._found("changed", f"source fingerprint {now}, read {', '.join(self.fingerprints)}")
        return self._found("present", "")

    def applied(self) -> bool:
        """Whether our wrapper stands there now."""
        stored = self.locate()[2]
        return bool(getattr(getattr(stored, "__func__", stored), "_chunkllm", False))

    def apply(self, wrap: Callable[[Any], Any]) -> Undo:
        """Replace the symbol on its owner by `wrap(original)`. Returns the undo, which puts back the very original.

        `wrap` gets and returns a plain function; static and class methods are unpacked and packed again here.
        """
        owner, name, stored = self.locate()
        if self.applied():
            raise PatchError(f"{self.target} is wrapped already")
        own = name in vars(owner)
        kind = type(stored) if isinstance(stored, (staticmethod, classmethod)) else None
        wrapper = wrap(stored.__func__ if kind else stored)
        wrapper._chunkllm = True
        setattr(owner, name, kind(wrapper) if kind else wrapper)
        replaced = inspect.getattr_static(owner, name)

        def undo() -> None:
            if inspect.getattr_static(owner, name) is not replaced:
                raise PatchError(f"{self.target} was wrapped by somebody else after us; undo that first")
            if own:
                setattr(owner, name, stored)
            else:
                delattr(owner, name)

        return undo

    def apply_to(self, instance: Any, wrap: Callable[[Any], Any]) -> Undo:
        """The same for one object: an instance attribute hides the method, and the undo removes it."""
        name = self.target.rpartition(".")[2]
        before = vars(instance).get(name)
        if getattr(before, "_chunkllm", False):
            raise PatchError(f"{self.target} is wrapped already")
        wrapper = wrap(getattr(instance, name))
        wrapper._chunkllm = True
        vars(instance)[name] = wrapper

        def undo() -> None:
            if vars(instance).get(name) is not wrapper:
                raise PatchError(f"{self.target} was wrapped by somebody else after us; undo that first")
            if before is None:
                del vars(instance)[name]
            else:
                vars(instance)[name] = before

        return undo

    def _found(self, status: str, detail: str) -> Probe:
        return Probe(target=self.target, status=status, detail=detail, capability=self.capability)


def fingerprint(function: object) -> str:
    """12 hex digits of a function's syntax tree: comments, docstrings and layout do not count."""
    return hashlib.sha256(normal_source(function).encode()).hexdigest()[:12]


def normal_source(function: object) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError, IndentationError):
        return ""
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
    return ast.unparse(tree)
