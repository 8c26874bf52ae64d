"""Patches as records: what they expect, and the way back."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chunkllm_bridge.common.errors import PatchError
from chunkllm_bridge.patches import Patch, fingerprint

MODULE = "an_engine"
SOURCE = '''
def plain(x, scale=1):
    """A docstring that may change."""
    return x * scale  # as may a comment

class Base:
    def inherited(self, x):
        return x + 1

class Engine(Base):
    def method(self, x):
        return x + 2

    @staticmethod
    def static(x):
        return x + 3

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, x)

    class Inner:
        def deep(self, x):
            return x + 4
'''


@pytest.fixture
def engine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    yield load(tmp_path, monkeypatch, SOURCE)
    sys.modules.pop(MODULE, None)


def load(folder: Any, monkeypatch: pytest.MonkeyPatch, source: str) -> types.ModuleType:
    """The module, from a file: fingerprints read the source."""
    path = folder / f"{MODULE}_{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    module = types.ModuleType(MODULE)
    exec(compile(source, str(path), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def patch(qualname: str, **expects: Any) -> Patch:
    return Patch(target=f"{MODULE}:{qualname}", capability="test", why="a test", remove_when="never", **expects)


def negated(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return "wrapped", original(*args, **kwargs)

    return wrapper


CALLS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda engine: engine.plain(2, scale=3),
    "Engine.method": lambda engine: engine.Engine().method(1),
    "Engine.inherited": lambda engine: engine.Engine().inherited(1),
    "Engine.static": lambda engine: (engine.Engine.static(1), engine.Engine().static(1)),
    "Engine.of_class": lambda engine: engine.Engine.of_class(1),
    "Engine.Inner.deep": lambda engine: engine.Engine.Inner().deep(1),
}


class TestApplying:
    @pytest.mark.parametrize("target", CALLS)
    def test_undo_puts_back_the_very_original(self, engine: Any, target: str) -> None:
        """Functions, methods, inherited, static and class methods: wrapped, then as if nothing had been."""
        call, record = CALLS[target], patch(target)
        owner, _, before = record.locate()
        mine, plainly = dict(vars(owner)), call(engine)

        undo = record.apply(negated)
        wrapped = call(engine)
        undo()

        assert wrapped in (
            ("wrapped", plainly),
            tuple(("wrapped", each) for each in plainly) if target == "Engine.static" else None,
        )
        assert plainly == call(engine)
        assert before is record.locate()[2]
        assert mine == dict(vars(owner))

    def test_an_inherited_method_is_wrapped_for_that_class_only(self, engine: Any) -> None:
        """Its base and its siblings are other people's."""
        undo = patch("Engine.inherited").apply(negated)

        assert 2 == engine.Base().inherited(1)
        undo()
        assert "inherited" not in vars(engine.Engine)

    @pytest.mark.parametrize("target", CALLS)
    def test_twice_is_refused(self, engine: Any, target: str) -> None:
        """Wrapped once, counted once. Case: vllm#10443, a plugin that runs several times."""
        record = patch(target)
        undo = record.apply(negated)

        assert record.applied()
        with pytest.raises(PatchError, match="wrapped already"):
            record.apply(negated)
        undo()
        assert not record.applied()
        record.apply(negated)()

    def test_undo_under_somebody_else_s_wrapper_is_refused(self, engine: Any) -> None:
        """Putting the original back would take theirs away. Case: NVIDIA-NeMo/RL#4155, two patchers that overwrote each
        other."""
        undo = patch("Engine.method").apply(negated)
        ours = engine.Engine.method
        engine.Engine.method = theirs = lambda self, x: ours(self, x)

        with pytest.raises(PatchError, match="wrapped by somebody else"):
            undo()
        assert theirs is engine.Engine.method
        engine.Engine.method = ours
        undo()

    def test_what_is_not_there_is_named(self, engine: Any) -> None:
        for target in (f"{MODULE}:Engine.gone", f"{MODULE}:Gone.method", "no_such_module:f", "no_such_module.deeper:f"):
            with pytest.raises(PatchError, match=target):
                Patch(target=target, capability="test", why="a test", remove_when="never").apply(negated)


class TestInstances:
    def test_one_object_is_wrapped_and_no_other(self, engine: Any) -> None:
        """An instance attribute hides the method; undo removes it."""
        one, other = engine.Engine(), engine.Engine()
        undo = patch("Engine.method").apply_to(one, negated)

        assert (("wrapped", 3), 3) == (one.method(1), other.method(1))
        undo()
        assert {} == vars(one)
        assert 3 == one.method(1)

    def test_what_the_object_had_of_its_own_comes_back(self, engine: Any) -> None:
        one = engine.Engine()
        one.method = own = lambda x: x * 100
        undo = patch("Engine.method").apply_to(one, negated)

        assert ("wrapped", 200) == one.method(2)
        undo()
        assert own is vars(one)["method"]

    def test_twice_is_refused(self, engine: Any) -> None:
        """Two bridges on one scheduler would count everything twice. Case: vllm#10443."""
        one = engine.Engine()
        patch("Engine.method").apply_to(one, negated)

        with pytest.raises(PatchError, match="wrapped already"):
            patch("Engine.method").apply_to(one, negated)

    def test_undo_out_of_order_is_refused(self, engine: Any) -> None:
        one = engine.Engine()
        undo = patch("Engine.method").apply_to(one, negated)
        one.method = lambda x: x

        with pytest.raises(PatchError, match="wrapped by somebody else"):
            undo()


class TestProbing:
    def test_what_was_read_is_present(self, engine: Any) -> None:
        """The source and the parameters are those that the patch was written against."""
        known = fingerprint(engine.plain)
        probe = patch("plain", parameters=("x", "scale"), fingerprints=("000000000000", known)).probe()

        assert ("present", "", True) == (probe.status, probe.detail, probe.usable)

    def test_another_source_is_changed(self, engine: Any) -> None:
        """Both fingerprints are told. Case: NVIDIA-NeMo/RL#4155, a patch that no longer matched."""
        probe = patch("plain", fingerprints=("000000000000",)).probe()

        now = fingerprint(engine.plain)
        assert ("changed", f"source fingerprint {now}, read 000000000000") == (probe.status, probe.detail)

    def test_a_lost_parameter_is_missing(self, engine: Any) -> None:
        """We would pass it by name; what there is is told. Case: dynamo#14234."""
        probe = patch("plain", parameters=("x", "gone", "away"), fingerprints=(fingerprint(engine.plain),)).probe()

        assert ("missing", "no parameter gone, away (it has scale, x)") == (probe.status, probe.detail)
        assert not probe.usable

    @pytest.mark.parametrize("target", ["Engine.gone", "Gone.method"])
    def test_a_lost_symbol_is_missing(self, engine: Any, target: str) -> None:
        """And it is no exception: the doctor goes on. Cases: vllm-plugin-FL#125, kvcached patch_base.py."""
        probe = patch(target).probe()

        assert "missing" == probe.status
        assert f"{MODULE}:{target}" in probe.detail

    def test_a_module_that_moved_is_missing(self) -> None:
        """Case: vllm-plugin-FL#125, `ModuleNotFoundError: vllm.v1.attention.backends.registry`."""
        record = Patch(target="no_such_module.registry:x", capability="test", why="a test", remove_when="never")

        assert "missing" == record.probe().status

    def test_our_own_wrapper_hides_nothing(self, engine: Any) -> None:
        """A probe of a running server sees the engine's source, not ours."""
        known = fingerprint(engine.Engine.method)
        undo = patch("Engine.method").apply(negated)

        assert "present" == patch("Engine.method", parameters=("x",), fingerprints=(known,)).probe().status
        undo()


class TestFingerprints:
    @pytest.mark.parametrize(
        ("old", "new", "same"),
        [
            ("A docstring that may change.", "Another.", True),
            ("  # as may a comment", "", True),
            ("x * scale", "(x*scale)", True),
            ("x * scale", "scale * x", False),
            ("scale=1", "scale=2", False),
        ],
    )
    def test_only_code_counts(
        self, engine: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str, same: bool
    ) -> None:
        """Comments, docstrings and layout do not."""
        before = fingerprint(engine.plain)
        after = fingerprint(load(tmp_path, monkeypatch, SOURCE.replace(old, new)).plain)

        assert same is (before == after)

    def test_what_has_no_source_has_one_fingerprint(self) -> None:
        """It matches nothing that was read, so it shows as changed."""
        assert fingerprint(len) == fingerprint(print) == fingerprint(None)
