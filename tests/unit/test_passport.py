"""The resolved spec on its way into every process: it arrives as it was, and a process that differs is refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from chunkllm_bridge.common.errors import IncompatibleError
from chunkllm_bridge.common.passport import Passport, check_handshake
from chunkllm_bridge.common.registry import Registry
from chunkllm_bridge.common.testing import FakeEngine, spec_for


@pytest.fixture
def passport() -> Passport:
    registry = Registry.installed()
    return Passport.issue(spec_for(FakeEngine(), {"plugin.priority": 7}, registry), registry, strict=False)


class TestTravel:
    def test_it_arrives_as_it_was(self, passport: Passport) -> None:
        """As JSON too, with what an adapter added."""
        passport = attrs.evolve(passport, engine={"scheduler": "theirs"})
        wire = json.loads(json.dumps(passport.to_wire()))

        assert passport == Passport.from_wire(wire)
        assert 7 == Passport.from_wire(wire).spec["plugin.priority"]

    @pytest.mark.parametrize("wish", [None, "on", {}, {"kv_cache": {"memory_ratio": 0.1}}])
    def test_a_wish_is_no_passport(self, passport: Passport, wish: Any) -> None:
        """What people write under our key is told from what a launch put there."""
        assert Passport.is_wire(passport.to_wire())
        assert not Passport.is_wire(wish)


class TestVerify:
    def test_a_process_that_sees_the_same_is_let_through(self, passport: Passport) -> None:
        """It gets the registry that it was checked against."""
        assert {"paged_kv", "batch_window"} <= set(passport.verify("scheduler").names())

    def test_one_that_differs_is_refused(self, passport: Passport) -> None:
        """With the process and both fingerprints."""
        with pytest.raises(IncompatibleError) as no:
            attrs.evolve(passport, fingerprint="0123456789ab").verify("worker of rank 1")

        for part in ("worker of rank 1", "0123456789ab", passport.fingerprint):
            assert part in str(no.value)


def status(*fingerprints: str) -> dict[str, Any]:
    """Of one engine: the core's fingerprint, then its workers'."""
    core, *workers = fingerprints
    rows = [{"role": "worker", "rank": rank, "fingerprint": print_} for rank, print_ in enumerate(workers)]
    return {"fingerprint": core, "workers": rows}


class TestHandshake:
    def test_all_alike(self, passport: Passport) -> None:
        ours = passport.fingerprint
        both = {**status(ours, ours), "engines": [status(ours, ours), status(ours, ours)]}

        check_handshake(status(ours, ours, ours), passport, "core")
        check_handshake(both, passport, "core")

    def test_everyone_who_differs_is_named(self, passport: Passport) -> None:
        """In every engine, under the name that this engine has for the process."""
        ours = passport.fingerprint
        both = {**status(ours, ours), "engines": [status(ours, ours, "b"), status("c", ours)]}
        with pytest.raises(IncompatibleError) as no:
            check_handshake(both, passport, "EngineCore")

        assert (
            f"engine 0: worker of rank 1 has fingerprint b, where it was launched {ours}",
            f"engine 1: EngineCore of rank 1 has fingerprint c, where it was launched {ours}",
        ) == no.value.reasons
