"""How a passport travels inside vLLM's own config, `VllmConfig.additional_config`, into every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from chunkllm_bridge.common.passport import KEY, Passport


class HashedConfig(Mapping[str, Any]):
    """`additional_config` with our key in it, which does not enter the key of vLLM's compile cache.

    vLLM hashes a plain dict whole (`config/vllm.py`), so another quota would compile the model again. What other
    plugins keep here is still hashed, and so is `graph`: what changes the compiled graph.
    """

    def __init__(self, items: Mapping[str, Any], graph: str = "") -> None:
        self._items = dict(items)
        self._graph = graph

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)

    def compute_hash(self) -> str:
        others = {key: value for key, value in self._items.items() if key != KEY}
        if not others and not self._graph:
            return "None"
        text = json.dumps([others, self._graph], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def travels_in(additional_config: object) -> bool:
    """Whether a passport is in there already, and not a user's wish."""
    return isinstance(additional_config, Mapping) and Passport.is_wire(additional_config.get(KEY))


def in_config(vllm_config: Any) -> Passport | None:
    """The passport in a `VllmConfig`, or None where the bridge is off."""
    config = vllm_config.additional_config
    return Passport.from_wire(config[KEY]) if travels_in(config) else None
