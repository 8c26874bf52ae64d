"""Control of a running engine from Python."""

from __future__ import annotations

from typing import Any

import pytest

from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.remote import Control
from chunkllm_bridge.common.testing import FakeBridge, FakeEngine, attach


class Here(Control):
    """To a bridge in this process."""

    def __init__(self, bridge: FakeBridge) -> None:
        self.bridge = bridge

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        return self.bridge.desk.handle(message)


@pytest.fixture
def control() -> Here:
    return Here(attach(FakeEngine(), {}))


def test_the_answers_are_the_engines(control: Here) -> None:
    """As plain data, without the envelope."""
    assert "fake" == control.status()["engine"]
    assert {"profile", "parameters"} == control.config().keys()
    assert {"paged_kv", "batch_window"} <= {plugin["name"] for plugin in control.plugins()["plugins"]}
    assert ["plugin.error_rate"] == list(control.set({"plugin.error_rate": 0.5})["changed"])


def test_a_refusal_is_raised_with_its_reason(control: Here) -> None:
    """And the status that says the same over HTTP."""
    with pytest.raises(ControlError, match=r"plugin\.error_rate = 7") as no:
        control.set({"plugin.error_rate": 7})

    assert 422 == no.value.status
