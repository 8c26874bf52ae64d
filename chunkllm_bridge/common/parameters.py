"""The operator's parameters: one record each, in the order of the manual."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from chunkllm_bridge.common import values
from chunkllm_bridge.common.abi import LONGEST_HOLD
from chunkllm_bridge.common.profiles import PROFILES
from chunkllm_bridge.common.values import Reader, Wrong

OWN_ATTENTION = ("auto", "paged")  # the engine's own; not plugins
BUILT_IN = ("paged_kv", "batch_window")  # plugins that are always active
STATE_FOLDER = "chunkllm-state"
HOT_RELOAD = "plugin.hot_reload"  # a command that looks like a setting


@attrs.frozen(kw_only=True)
class Parameter:
    """What may be set, and what is then said about it."""

    key: str
    default: Any
    reads: Reader
    shows: Callable[[Any], str] = values.to_text
    restores: Callable[[Any], Any] = attrs.field(default=lambda value: value)  # from what JSON made of it
    live: bool = False  # changeable while serving
    live_each: bool = False  # so is plugins.<name>.<key>
    seam: str | None = None  # it names a plugin, which must have this seam
    advised: float = math.inf  # above it: a warning, which ends with `risk`
    risk: str = ""

    def read(self, value: object) -> Any:
        """The value in effect, or Wrong; text that would be right without its quotes is suggested so."""
        try:
            return self.reads(value)
        except Wrong as wrong:
            if wrong.nearest is None and isinstance(value, str):
                with suppress(Wrong):
                    self.reads(meant := values.from_text(value))
                    wrong.nearest = values.to_toml(meant)
            raise

    def warning(self, key: str, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= self.advised:
            return None
        return f"{key} = {self.shows(value)} is above the advised {self.shows(self.advised)}: {self.risk}"


def draft_tokens(value: object) -> int:
    if value == 0 and type(value) is int:
        raise Wrong("must be a whole number from 1 up; speculative.plugin = none turns drafting off", "1")
    return int(values.whole(1)(value))


_TABLE = (
    Parameter(key="attention.plugin", default="auto", reads=values.name, seam="attention", live=True),
    Parameter(key="kv_cache.strategy", default="paged", reads=values.one_of("paged")),
    Parameter(
        key="kv_cache.memory_ratio",
        default="engine",
        reads=values.share("engine", "engine"),
        live=True,
        advised=0.40,
        risk="weights, activations and plugins share what is left",
    ),
    Parameter(
        key="kv_cache.max_layer_bytes",
        default=8 * 2**30,
        reads=values.size,
        shows=values.show_size,
        advised=8 * 2**30,
        risk="one layer's cache may crowd out the rest",
    ),
    Parameter(key="plugin.memory_ratio", default=None, reads=values.share("none", None), shows=values.show_or_none),
    Parameter(
        key="plugin.batch_window",
        default=None,
        reads=values.span("ms", off=True, below=LONGEST_HOLD),
        shows=values.show_span,
        live=True,
        advised=0.015,
        risk="latency rises",
    ),
    Parameter(
        key="speculative.plugin",
        default=None,
        reads=values.name_or_none,
        shows=values.show_or_none,
        seam="drafts",
        live=True,
    ),
    Parameter(
        key="speculative.tokens",
        default=4,
        reads=draft_tokens,
        live=True,
        advised=6,
        risk="acceptance falls by 12 % and more",
    ),
    Parameter(key="plugin.priority", default=50, reads=values.whole(0, 99), live=True, live_each=True),
    Parameter(key="plugin.fp8", default=False, reads=values.flag),
    Parameter(key="plugin.error_rate", default=0.05, reads=values.rate, live=True, live_each=True),
    Parameter(
        key="rollback.config",
        default=None,
        reads=values.folder,
        shows=values.show_or_none,
        restores=lambda value: value and Path(value),
    ),
    Parameter(
        key="plugin.disable",
        default=frozenset(),
        reads=values.names,
        shows=values.show_names,
        restores=lambda value: value if isinstance(value, str) else frozenset(value),
    ),
    Parameter(key="plugin.cache.ttl", default=86400.0, reads=values.span("h"), shows=values.show_span, live=True),
    Parameter(key="plugin.latency.p99", default=0.120, reads=values.span("ms"), shows=values.show_span, live=True),
    Parameter(key="profile", default=None, reads=values.one_of(*PROFILES)),
)
PARAMETERS: Mapping[str, Parameter] = MappingProxyType({parameter.key: parameter for parameter in _TABLE})

# What may follow `plugins.<name>.`, besides the plugin's own keys.
EACH: Mapping[str, Parameter] = MappingProxyType(
    {key[7:]: row for key, row in PARAMETERS.items() if key.startswith("plugin.") and key != "plugin.disable"}
)


def live_keys() -> tuple[str, ...]:
    """Every key that may change while the engine serves."""
    each = (f"plugins.<name>.{key}" for key, row in EACH.items() if row.live_each)
    return (*(key for key, row in PARAMETERS.items() if row.live), *each, "plugins.<name>.<own key>")
