"""A spec is read strictly: every mistake is named with its place, and what is right survives unchanged."""

from __future__ import annotations

import copy
import json
import pickle
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chunkllm_bridge.common import values as spelling
from chunkllm_bridge.common.errors import BridgeError, ConfigError, Problem
from chunkllm_bridge.common.parameters import EACH, PARAMETERS
from chunkllm_bridge.common.profiles import Hardware
from chunkllm_bridge.common.spec import Source, Spec, Value, live_keys
from chunkllm_bridge.common.written import line_of, statements

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
ROOT = Path(__file__).resolve().parents[2]
CPU = Hardware(device="cpu", name="cpu", memory_bytes=24 * 10**9)
H100 = Hardware(device="cuda", name="NVIDIA H100", memory_bytes=85 * 10**9, compute_capability=(9, 0))
A100 = Hardware(device="cuda", name="NVIDIA A100", memory_bytes=85 * 10**9, compute_capability=(8, 0))
RTX = Hardware(device="cuda", name="NVIDIA GeForce RTX 4090", memory_bytes=25 * 10**9, compute_capability=(8, 9))


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


@attrs.frozen(kw_only=True)
class Rule:
    weight: float
    word: str = ""


@attrs.frozen(kw_only=True)
class MedusaConfig:
    heads: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    top_k: int = attrs.field(default=10, validator=attrs.validators.ge(1))
    scale: float = 1.0
    label: str = ""
    layers: list[int] = attrs.field(factory=list)
    words: tuple[str, ...] = ()
    mode: Literal["greedy", "typical"] = "greedy"
    limit: int | None = None
    rules: Mapping[str, Rule] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class NeedyConfig:
    path: str
    size: int


@attrs.frozen(kw_only=True)
class BoundConfig:
    memory_ratio: float | Literal["engine"] = attrs.field(metadata={"parameter": "kv_cache.memory_ratio"})


@attrs.frozen
class Plugins:
    """A catalogue of fakes; `broken` ones cannot be imported, `heavy` ones need an accelerator."""

    table: Mapping[str, tuple[frozenset[str], type]]
    broken: frozenset[str] = frozenset()
    heavy: frozenset[str] = frozenset()
    refused: Mapping[str, str] = MappingProxyType({})

    def names(self) -> Sequence[str]:
        return sorted({*self.table, *self.broken})

    def needs_accelerator(self, name: str) -> bool:
        return name in self.heavy

    def seams(self, name: str) -> frozenset[str]:
        self._import(name)
        return self.table[name][0]

    def config_class(self, name: str) -> type:
        self._import(name)
        return self.table[name][1]

    def _import(self, name: str) -> None:
        if name in self.broken:
            raise BridgeError(f"{name} cannot be imported: no module named 'gone'")


BUILT_IN = {
    "paged_kv": (frozenset({"blocks"}), BoundConfig),
    "batch_window": (frozenset({"batching"}), NoConfig),
}
BARE = Plugins(BUILT_IN)
FULL = Plugins(
    {
        **BUILT_IN,
        "flash2": (frozenset({"attention"}), NoConfig),
        "fp8": (frozenset({"weights"}), NoConfig),
        "medusa": (frozenset({"drafts"}), MedusaConfig),
        "needy": (frozenset({"attention", "drafts"}), NeedyConfig),
    }
)


def resolve(
    text: str | None = None,
    *sets: str,
    hardware: Hardware = A100,
    catalogue: Plugins = FULL,
    file: Path | None = Path("/specs/chunkllm.toml"),
) -> Spec:
    return Spec.resolve(file=file, text=text or "", sets=sets, hardware=hardware, catalogue=catalogue)


def mistakes(text: str | None = None, *sets: str, **options: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        resolve(text, *sets, **options)
    return list(caught.value.problems)


def mistake(text: str | None = None, *sets: str, **options: Any) -> Problem:
    (problem,) = mistakes(text, *sets, **options)
    return problem


# --- sources ----------------------------------------------------------------------------------------------------------


def test_defaults_are_the_manuals() -> None:
    """Without a word from anybody every parameter has the manual's default, and rollback lies beside the spec."""
    spec = resolve()

    assert {
        "attention.plugin": "auto",
        "kv_cache.strategy": "paged",
        "kv_cache.memory_ratio": "engine",
        "kv_cache.max_layer_bytes": 8 * 2**30,
        "plugin.memory_ratio": None,
        "plugin.batch_window": None,
        "speculative.plugin": None,
        "speculative.tokens": 4,
        "plugin.priority": 50,
        "plugin.fp8": False,
        "plugin.error_rate": 0.05,
        "rollback.config": Path("/specs/chunkllm-state"),
        "plugin.disable": frozenset(),
        "plugin.cache.ttl": 86400.0,
        "plugin.latency.p99": 0.12,
        "profile": "gpu",
    } == {key: spec[key] for key in PARAMETERS}
    assert {"default"} == {str(spec.value(key).source) for key in PARAMETERS}
    assert () == spec.active == spec.warnings


def test_launch_line_beats_file_beats_profile_beats_default() -> None:
    """Each value comes from the strongest place that names it, and says which."""
    text = 'plugin.disable = "none"\n\n[speculative]\ntokens = 3\n'
    layers = [
        resolve(None, hardware=CPU),
        resolve(text, hardware=CPU),
        resolve(text, "plugin.disable=everything", "speculative.tokens=2", hardware=CPU),
    ]

    assert [
        Value("all", Source("profile", "cpu")),
        Value(frozenset(), Source("file", "chunkllm.toml:1")),
        Value("everything", Source("set")),
    ] == [spec.value("plugin.disable") for spec in layers]
    assert ["default", "chunkllm.toml:4", "--plugin-set"] == [
        str(spec.value("speculative.tokens").source) for spec in layers
    ]
    assert "profile cpu" == str(layers[0].value("plugin.disable").source)


def test_profile_can_be_named_by_the_operator() -> None:
    """`profile` is a key like any other; the launch line beats the file."""
    assert "cpu" == resolve('profile = "cpu"').profile
    assert "consumer" == resolve('profile = "cpu"', "profile=consumer").profile
    assert "h100" == mistake('profile = "h10"').nearest


def test_file_is_read_from_disk(tmp_path: Path) -> None:
    """The file on disk is read, with or without a byte-order mark; relative folders start beside it."""
    file = tmp_path / "my.toml"
    file.write_bytes(b"\xef\xbb\xbfrollback.config = 'state'\r\nplugin.priority = 60\r\n")
    spec = Spec.resolve(file=file, hardware=A100, catalogue=BARE)

    assert tmp_path / "state" == spec["rollback.config"]
    assert "my.toml:2" == str(spec.value("plugin.priority").source)
    assert file == spec.origin


def test_no_file_is_no_folder() -> None:
    """Without a spec file the folder of snapshots is left to be chosen."""
    spec = Spec.resolve(file=None, hardware=A100, catalogue=BARE)

    assert spec["rollback.config"] is None
    assert spec.origin is None


def test_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    """A file that is not there is answered with the one that may have been meant."""
    (tmp_path / "chunkllm.toml").touch()
    with pytest.raises(ConfigError, match=r"chunklm.toml: there is no such file \(did you mean chunkllm.toml\?\)"):
        Spec.resolve(file=tmp_path / "chunklm.toml", hardware=A100, catalogue=BARE)


@pytest.mark.parametrize("content", [None, b'a = "\xff"\n'])
def test_unreadable_file_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    """A folder or a file in another encoding is a mistake of the spec, not a crash; the launch line is still read."""
    file = tmp_path / "spec"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Spec.resolve(file=file, sets=["speculative.tokens=0"], hardware=A100, catalogue=BARE)

    assert 2 == len(caught.value.problems)


# --- TOML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key", "text"),
    [
        (2, "speculative.tokens 3", "\nspeculative.tokens 3\n"),
        (3, "kv_cache", "[kv_cache]\n[plugin]\n[kv_cache]\n"),
        (2, "speculative.tokens", "speculative.tokens = 3\nspeculative.tokens = 4\n"),
        (3, "kv_cache.memory_ratio", "[kv_cache]\nmemory_ratio = 0.1\nmemory_ratio = [\n 1,\n 2\n]\n"),
        (1, "a = [", "a = ["),
        (1, "=", "="),
    ],
)
def test_broken_toml_is_named_by_line(line: int, key: str, text: str) -> None:
    """A syntax error or a key given twice is told with its line and what stands there."""
    problem = mistake(text)

    assert f"chunkllm.toml:{line}" == problem.where
    assert key == problem.key


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "\0", "a = 'x\x01'", '"', "[", "[[a", "a.=1"]
)
def test_hostile_toml_is_a_config_error(text: str) -> None:
    """Whatever the file holds, the answer is a ConfigError."""
    assert mistakes(text)


LINES = '''# a comment with [brackets] and = signs
attention.plugin = "auto" # kv_cache.memory_ratio = 1
"kv_cache" . 'memory_ratio' = 0.3
words = """
[not.a.table]
kv_cache.strategy = "paged"
"""
list = [
  "]", # ]
  [1, 2],
]
[ plugins . medusa ] # header
heads = 3
cache.ttl = "24h"
[plugins]
"needy".path = 'a#b'
flash2 = { priority = 3, error_rate = 0.1 }
'''


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (2, "attention.plugin"),
        (3, "kv_cache.memory_ratio"),
        (4, "words"),
        (8, "list"),
        (12, "plugins.medusa"),
        (13, "plugins.medusa.heads"),
        (14, "plugins.medusa.cache.ttl"),
        (16, "plugins.needy.path"),
        (16, "plugins.needy"),
        (17, "plugins.flash2.error_rate"),
    ],
)
def test_lines_of_keys(line: int, key: str) -> None:
    """A key's line is found through tables, dotted and quoted keys, comments, multi-line texts and lists."""
    assert line == line_of(tuple(key.split(".")), statements(LINES))


@given(st.text())
@CALM
def test_line_scan_never_fails(text: str) -> None:
    """Looking for lines in a broken text finds few or none, and never raises."""
    assert all(line >= 1 for _, line in statements(text))


def test_quoted_dots_are_no_dots() -> None:
    """A quoted key that holds a dot is not the dotted key, and is not taken for it."""
    assert "kv_cache.memory_ratio" == mistake('"kv_cache.memory_ratio" = 0.3').nearest
    assert "plugins.medusa.cache.ttl" == mistake('plugins.medusa."cache.ttl" = "1h"').nearest


def test_empty_tables_change_nothing() -> None:
    """An empty table of parameters is as good as none; an empty table of a plugin activates it."""
    assert resolve().config_hash() == resolve("[kv_cache]\n[plugin]\ncache = {}\n").config_hash()
    assert ("medusa",) == resolve("[plugins.medusa]\n").active
    assert "kv_cache" in str(mistake("[kv_cach]\n").nearest)


# --- typos (vllm#35573: unknown keys fail silently) -------------------------------------------------------------------

TYPOS = [
    ("num_spec_tokens", "speculative.tokens"),
    ("num_speculative_tokens", "speculative.tokens"),
    ("speculative.token", "speculative.tokens"),
    ("speculative.num_tokens", "speculative.tokens"),
    ("speculativ.tokens", "speculative.tokens"),
    ("speculative.plugins", "speculative.plugin"),
    ("memory_ratio", "kv_cache.memory_ratio"),
    ("kv_cache.memry_ratio", "kv_cache.memory_ratio"),
    ("kvcache.memory_ratio", "kv_cache.memory_ratio"),
    ("kv_cache.ratio", "kv_cache.memory_ratio"),
    ("KV_CACHE.MEMORY_RATIO", "kv_cache.memory_ratio"),
    ("kv_cache.max_layer_byte", "kv_cache.max_layer_bytes"),
    ("kv_cache.stratgy", "kv_cache.strategy"),
    ("batch_window", "plugin.batch_window"),
    ("plugin.batch-window", "plugin.batch_window"),
    ("plugin.prio", "plugin.priority"),
    ("plugin.latency.p90", "plugin.latency.p99"),
    ("plugin.cache_ttl", "plugin.cache.ttl"),
    ("rollback.configs", "rollback.config"),
    ("attention.plugn", "attention.plugin"),
    ("profil", "profile"),
    ("plugin.medusa.priority", "plugins.medusa.priority"),
    ("medusa.heads", "plugins.medusa.heads"),
    ("plugins.medus.heads", "plugins.medusa"),
    ("plugins.medusa.headz", "plugins.medusa.heads"),
    ("plugins.medusa.priorty", "plugins.medusa.priority"),
    ("plugins.medusa.cache.tl", "plugins.medusa.cache.ttl"),
    ("plugins.priority", "plugin.priority"),
]


@pytest.mark.parametrize(("typo", "right"), TYPOS)
@pytest.mark.parametrize("place", ["file", "launch line"])
def test_typo_is_answered_with_the_right_key(typo: str, right: str, place: str) -> None:
    """Every misspelt key is one error with its place and the key that was meant."""
    problem = mistake(f"\n{typo} = 3\n") if place == "file" else mistake(None, f"{typo}=3")

    assert right == problem.nearest
    assert ("chunkllm.toml:2" if place == "file" else "--plugin-set") == problem.where
    assert f"did you mean {right}?" in str(problem)


def test_twenty_typos_are_twenty_errors() -> None:
    """All typos of a file are told at once."""
    found = mistakes("".join(f"{typo} = 3\n" for typo, _ in TYPOS[:20]))

    assert [(typo, right) for typo, right in TYPOS[:20]] == [(problem.key, problem.nearest) for problem in found]


def test_foreign_key_gets_no_silly_suggestion() -> None:
    """A key that is like none of ours is refused without a guess."""
    assert mistake('temperature_unit = "K"').nearest is None


KEYS = [*PARAMETERS, *(f"plugins.medusa.{key}" for key in (*EACH, "heads", "label", "rules"))]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid key with one letter dropped, doubled, swapped, replaced or put in."""
    key = draw(st.sampled_from(KEYS))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(string.ascii_letters + string.digits + "_-."))
    return draw(
        st.sampled_from(
            [
                key[:at] + key[at + 1 :],
                key[:at] + key[at] + key[at:],
                key[:at] + key[at : at + 2][::-1] + key[at + 2 :],
                key[:at] + letter + key[at + 1 :],
                key[:at] + letter + key[at:],
            ]
        )
    )


@given(key=mutated(), value=st.sampled_from(["3", "0.3", '"10ms"', "true", "{}", "[]", '"all"']))
@settings(CALM, max_examples=400)
def test_mutated_key_never_passes(key: str, value: str) -> None:
    """A key that differs from all valid ones by a letter is refused, in a file and on the launch line."""
    assume(key not in KEYS and key != "plugins.medusa")
    assume(not (value == "{}" and any(known.startswith(f"{key}.") for known in KEYS)))

    assert mistakes(f"{key} = {value}\n")
    assert mistakes(None, f"{key}={value}")


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "key", "text"),
    [
        ("engine", "kv_cache.memory_ratio", '"engine"'),
        (0.4, "kv_cache.memory_ratio", "0.40"),
        (1.0, "kv_cache.memory_ratio", "1"),
        (1000, "kv_cache.max_layer_bytes", "1000"),
        (2**33, "kv_cache.max_layer_bytes", '"8GiB"'),
        (512 * 10**6, "kv_cache.max_layer_bytes", '"512 MB"'),
        (3 * 2**29, "kv_cache.max_layer_bytes", '"1.5GiB"'),
        (0.01, "plugin.batch_window", '"10ms"'),
        (0.5, "plugin.batch_window", '"0.5s"'),
        (None, "plugin.batch_window", '"off"'),
        (None, "plugin.batch_window", '"0ms"'),
        (7200.0, "plugin.cache.ttl", '"2h"'),
        (86400.0, "plugin.cache.ttl", '"1d"'),
        (90.0, "plugin.cache.ttl", '"1.5 min"'),
        (0.0005, "plugin.latency.p99", '"500us"'),
        (0, "plugin.priority", "0"),
        (99, "plugin.priority", "99"),
        (1, "speculative.tokens", "1"),
        (0.0, "plugin.error_rate", "0"),
        (1.0, "plugin.error_rate", "1.0"),
        (0.25, "plugin.memory_ratio", "0.25"),
        (None, "plugin.memory_ratio", '"none"'),
        (frozenset(), "plugin.disable", '"none"'),
        (frozenset(), "plugin.disable", "[]"),
        (frozenset({"medusa"}), "plugin.disable", '"medusa"'),
        (frozenset({"medusa", "fp8"}), "plugin.disable", '["medusa", "fp8"]'),
        ("all", "plugin.disable", '"all"'),
        ("everything", "plugin.disable", '["everything"]'),
        ("paged", "attention.plugin", '"paged"'),
        ("flash2", "attention.plugin", '"flash2"'),
        ("medusa", "speculative.plugin", '"medusa"'),
        (None, "speculative.plugin", '"none"'),
        (Path("/specs/state"), "rollback.config", '"state"'),
        (Path("/var/state"), "rollback.config", '"/var/state"'),
    ],
)
def test_value_in_effect(expected: object, key: str, text: str) -> None:
    """A right value means the same in a file and on the launch line."""
    in_file, on_line = resolve(f"{key} = {text}\n"), resolve(None, f"{key}={text}")

    assert expected == in_file[key] == on_line[key]
    assert type(expected) is type(in_file[key]) or isinstance(expected, Path)


@pytest.mark.parametrize(
    ("key", "text", "nearest"),
    [
        ("kv_cache.memory_ratio", "0", None),
        ("kv_cache.memory_ratio", "-0.1", None),
        ("kv_cache.memory_ratio", "1.01", None),
        ("kv_cache.memory_ratio", "nan", None),
        ("kv_cache.memory_ratio", "inf", None),
        ("kv_cache.memory_ratio", "true", None),
        ("kv_cache.memory_ratio", "40", "0.4"),
        ("kv_cache.memory_ratio", '"40%"', "0.4"),
        ("kv_cache.memory_ratio", '"0.4"', "0.4"),
        ("kv_cache.memory_ratio", '"engin"', "engine"),
        ("kv_cache.memory_ratio", "[0.4]", None),
        ("kv_cache.memory_ratio", "1" + "0" * 400, None),
        ("kv_cache.strategy", '"pagd"', "paged"),
        ("kv_cache.strategy", "1", None),
        ("kv_cache.max_layer_bytes", "0", None),
        ("kv_cache.max_layer_bytes", "-5", None),
        ("kv_cache.max_layer_bytes", "1.5", None),
        ("kv_cache.max_layer_bytes", "true", None),
        ("kv_cache.max_layer_bytes", '"8 gib"', '"8GiB"'),
        ("kv_cache.max_layer_bytes", '"8G"', '"8GiB"'),
        ("kv_cache.max_layer_bytes", '"0.5B"', None),
        ("plugin.memory_ratio", "0", None),
        ("plugin.batch_window", "10", '"10ms"'),
        ("plugin.batch_window", '"10"', '"10ms"'),
        ("plugin.batch_window", "0.01", '"0.01s"'),
        ("plugin.batch_window", "true", None),
        ("plugin.batch_window", '"10m"', '"10ms"'),
        ("plugin.batch_window", '"10 MSEC"', '"10ms"'),
        ("plugin.batch_window", '"of"', "off"),
        ("plugin.batch_window", '"-1ms"', None),
        ("plugin.cache.ttl", "24", '"24h"'),
        ("plugin.cache.ttl", '"10m"', '"10min"'),
        ("plugin.cache.ttl", '"24hours"', '"24h"'),
        ("plugin.cache.ttl", '"0h"', None),
        ("plugin.cache.ttl", '"off"', None),
        ("speculative.tokens", "0", "1"),
        ("speculative.tokens", "true", None),
        ("speculative.tokens", '"4"', "4"),
        ("speculative.tokens", "4.0", "4"),
        ("speculative.tokens", "1e300", str(int(1e300))),
        ("speculative.tokens", "nan", None),
        ("plugin.priority", "100", "99"),
        ("plugin.priority", "-1", "0"),
        ("plugin.priority", "1979-05-27", None),
        ("plugin.error_rate", "1.5", None),
        ("plugin.error_rate", "5", "0.05"),
        ("plugin.error_rate", "nan", None),
        ("plugin.fp8", '"yes"', "true"),
        ("plugin.fp8", "1", "true"),
        ("plugin.disable", '"medusas"', "medusa"),
        ("plugin.disable", '["medusa", "al"]', "all"),
        ("plugin.disable", '["medusa", "all"]', '"all"'),
        ("plugin.disable", "true", None),
        ("plugin.disable", "[1]", None),
        ("attention.plugin", '"flash"', "flash2"),
        ("attention.plugin", '"medusa"', None),
        ("attention.plugin", '""', None),
        ("speculative.plugin", '"auto"', None),
        ("speculative.plugin", '"Medusa"', "medusa"),
        ("rollback.config", '""', None),
        ("rollback.config", "3", None),
        ("rollback.config", '"~nobody-of-this-name/x"', None),
        ("profile", '"cuda"', None),
        ("plugins", "3", "plugin.fp8"),
        ("plugins.medusa", "3", "plugins.medusa"),
    ],
)
def test_wrong_value_is_refused(key: str, text: str, nearest: str | None) -> None:
    """A wrong value is one error with the key, and the nearest right value where there is one."""
    for problem in (mistake(f"{key} = {text}\n"), mistake(None, f"{key}={text}")):
        assert key == problem.key
        if key != "plugins":
            assert nearest == problem.nearest


def test_launch_line_words_need_no_quotes() -> None:
    """What is no TOML on the launch line is taken as text; what is stays typed."""
    spec = resolve(None, "plugin.batch_window=10ms", "attention.plugin = flash2", "plugins.medusa.label=two words")

    assert (0.01, "flash2", "two words") == (
        spec["plugin.batch_window"],
        spec["attention.plugin"],
        spec["plugins.medusa.label"],
    )


@pytest.mark.parametrize(
    ("item", "nearest"),
    [
        ("speculative.tokens", "speculative.tokens=VALUE"),
        ("speculative.tokens 4", "speculative.tokens=VALUE"),
        ("=4", None),
        ("speculative.tokens=", "speculative.tokens=VALUE"),
        ("", None),
    ],
)
def test_malformed_launch_line(item: str, nearest: str | None) -> None:
    """What is not KEY=VALUE is refused with the form that was meant."""
    assert nearest == mistake(None, item).nearest


@pytest.mark.parametrize(
    "sets",
    [
        ("speculative.tokens=3", "speculative.tokens=3"),
        ("speculative.tokens=3", "speculative = {tokens = 4}"),
        ("plugins.medusa.heads=3", "plugins.medusa={heads=4}"),
        ("plugins.medusa.rules.a.weight=1", "plugins.medusa.rules.a.weight=2"),
    ],
)
def test_key_given_twice_on_the_launch_line(sets: tuple[str, ...]) -> None:
    """A key may stand on the launch line once, in whatever form."""
    assert "given twice" == mistake(None, *sets).reason


def test_launch_line_text_cannot_smuggle_keys() -> None:
    """A value that holds a line break is a value, not more keys."""
    assert "plugin.priority" == mistake(None, "plugin.priority=3\nspeculative.tokens=9").key


def test_hot_reload_is_a_command() -> None:
    """`plugin.hot_reload` as a setting is refused with the command to use."""
    assert "chunkllm reload NAME" in mistake("plugin.hot_reload = true").reason
    assert "chunkllm reload medusa" in mistake("plugins.medusa.hot_reload = true").reason


def test_all_mistakes_at_once() -> None:
    """One error lists every mistake of file, launch line, plugin tables and sums, each with its place."""
    text = """kv_cache.memory_ratio = 0.9
[plugin]
prioritty = 3
batch_window = 10
[plugins.medusa]
heads = "3"
memory_ratio = 0.4
[plugins.needy]
size = 3
[plugins.medsa]
x = 1
y = 2
"""
    found = [(p.where, p.key) for p in mistakes(text, "speculative.tokens=0", "nonsense")]

    assert [
        ("--plugin-set", "nonsense"),
        ("chunkllm.toml:3", "plugin.prioritty"),
        ("chunkllm.toml:4", "plugin.batch_window"),
        ("chunkllm.toml:11", "plugins.medsa"),
        ("--plugin-set", "speculative.tokens"),
        ("chunkllm.toml:1", "kv_cache.memory_ratio"),
        ("chunkllm.toml:6", "plugins.medusa.heads"),
        ("chunkllm.toml:9", "plugins.needy.path"),
    ] == found


# --- plugins and their own configs ------------------------------------------------------------------------------------


def test_active_are_tables_and_named_plugins() -> None:
    """A plugin is active by its table or by name; the engine's own attention and built-in plugins are not listed."""
    text = 'attention.plugin = "flash2"\nspeculative.plugin = "medusa"\n[plugins.needy]\npath = "x"\nsize = 1\n'

    assert ("needy", "flash2", "medusa") == resolve(text).active
    assert ("batch_window",) == resolve("plugins.batch_window.priority = 60").active


def test_for_plugin_falls_back_to_all_plugins() -> None:
    """A plugin's own setting beats the one for all; every other plugin has the one for all."""
    spec = resolve('plugin.priority = 40\nplugins.medusa = {priority = 60, cache.ttl = "1h"}\n')

    assert (60, 40) == (spec.for_plugin("medusa", "priority"), spec.for_plugin("flash2", "priority"))
    assert (3600.0, 86400.0) == (spec.for_plugin("medusa", "cache.ttl"), spec.for_plugin("x", "cache.ttl"))
    assert {key: spec[f"plugin.{key}"] for key in EACH} == {key: spec.for_plugin("flash2", key) for key in EACH}


def test_plugin_config_is_what_was_given() -> None:
    """The plugin's own keys come back as written, without the bridge's."""
    text = "[plugins.medusa]\npriority = 3\nheads = 2\nlayers = [1, 2]\nscale = 2\nrules.a.weight = 1.5\n"

    assert {"heads": 2, "layers": [1, 2], "scale": 2, "rules": {"a": {"weight": 1.5}}} == resolve(text).plugin_config(
        "medusa"
    )
    assert {} == resolve(text).plugin_config("flash2")


@pytest.mark.parametrize(
    ("field", "text", "nearest"),
    [
        ("heads", '"3"', "3"),
        ("heads", "3.0", None),
        ("heads", "true", None),
        ("heads", "0", None),
        ("heads", "[3]", None),
        ("heads", "1979-05-27", None),
        ("scale", '"1.5"', "1.5"),
        ("scale", "true", None),
        ("scale", "nan", None),
        ("label", "3", '"3"'),
        ("layers", '"12"', None),
        ("layers", '["1"]', None),
        ("layers", "[true]", None),
        ("words", '"abc"', None),
        ("words", "[1]", None),
        ("mode", '"gredy"', None),
        ("mode", "1", None),
        ("limit", '"3"', "3"),
        ("limit", "true", None),
        ("rules", "[]", None),
        ("rules", "{a = {}}", None),
        ("rules", '{a = {weight = "1"}}', None),
        ("rules", "{a = {weight = 1, wight = 2}}", None),
    ],
)
def test_own_setting_is_typed(field: str, text: str, nearest: str | None) -> None:
    """A plugin's own setting of another type, or out of its range, is refused where it stands; nothing is coerced."""
    problem = mistake(f"[plugins.medusa]\n\n{field} = {text}\n")

    assert f"plugins.medusa.{field}" == problem.key
    assert "chunkllm.toml:3" == problem.where
    assert nearest == problem.nearest


def test_every_broken_range_is_told() -> None:
    """Two settings out of range are two mistakes, though attrs would stop at the first."""
    assert ["plugins.medusa.heads", "plugins.medusa.top_k"] == [
        problem.key for problem in mistakes("plugins.medusa = {heads = 0, top_k = 0}")
    ]


def test_missing_settings_are_told_where_the_plugin_is_named() -> None:
    """A setting that the plugin must have is missed, at the place that activates the plugin."""
    found = mistakes('\nattention.plugin = "needy"\n')

    assert [("plugins.needy.path", "chunkllm.toml:2"), ("plugins.needy.size", "chunkllm.toml:2")] == [
        (problem.key, problem.where) for problem in found
    ]


def test_plugin_without_settings_takes_none() -> None:
    """A plugin whose Config is empty refuses every key of its own."""
    assert "unknown key" == mistake("plugins.flash2.tile = 3").reason


def test_config_cannot_use_the_bridges_names() -> None:
    """A Config field named like one of the bridge's settings could never be set, and is told; a bound one is fine."""

    @attrs.frozen
    class Greedy:
        priority: int = 3

    catalogue = Plugins({"greedy": (frozenset(), Greedy), **BUILT_IN})

    assert "bridge's own" in mistake("[plugins.greedy]", catalogue=catalogue).reason
    assert 0.2 == resolve("plugins.paged_kv.memory_ratio = 0.2").for_plugin("paged_kv", "memory_ratio")


def test_private_fields_are_set_by_their_alias() -> None:
    """What attrs takes in __init__ is the key, and fields outside of it are no keys."""

    @attrs.frozen
    class Private:
        _size: int
        made: int = attrs.field(init=False, default=0)

    catalogue = Plugins({"private": (frozenset(), Private)})

    assert {"size": 3} == resolve("plugins.private.size = 3", catalogue=catalogue).plugin_config("private")
    assert ["plugins.private.made"] == [
        p.key for p in mistakes("plugins.private = {size = 3, made = 1}", catalogue=catalogue)
    ]


def test_config_that_raises_is_a_mistake() -> None:
    """A Config that refuses the settings as a whole, in whatever way, is a mistake of the spec."""

    @attrs.frozen
    class Moody:
        a: int = 0

        def __attrs_post_init__(self) -> None:
            raise RuntimeError("not today")

    problem = mistake("[plugins.moody]", catalogue=Plugins({"moody": (frozenset(), Moody)}))

    assert ("plugins.moody", "not today") == (problem.key, problem.reason)


def test_broken_plugin_costs_only_those_who_name_it() -> None:
    """A plugin that cannot be imported stops the spec that names it, with its words, and no other."""
    catalogue = attrs.evolve(FULL, broken=frozenset({"broken"}))

    assert resolve('attention.plugin = "flash2"', catalogue=catalogue)
    assert "flash2" == mistake('attention.plugin = "flash"', catalogue=catalogue).nearest
    assert "no module" in mistake('attention.plugin = "broken"', catalogue=catalogue).reason
    assert "no module" in mistake("[plugins.broken]", catalogue=catalogue).reason


def test_wrong_seam_names_the_seams_it_has() -> None:
    """A plugin without the seam is refused with the seams that it has."""
    assert "medusa has no attention seam (it has: drafts)" == mistake('attention.plugin = "medusa"').reason
    assert "known: auto, paged, flash2, needy" in mistake('attention.plugin = "flash9"').reason


# --- limits, profiles, warnings ---------------------------------------------------------------------------------------


def test_consumer_profile_forces_the_share() -> None:
    """On a consumer GPU every plugin's share is 0.25; a larger one is refused, a smaller one is not."""
    assert 0.25 == resolve(hardware=RTX)["plugin.memory_ratio"]
    assert 0.2 == resolve("plugin.memory_ratio = 0.2", hardware=RTX)["plugin.memory_ratio"]
    assert "0.25" == mistake("plugin.memory_ratio = 0.3", hardware=RTX).nearest
    assert "0.25" == mistake('plugin.memory_ratio = "none"', hardware=RTX).nearest
    assert "plugins.medusa.memory_ratio" == mistake("plugins.medusa.memory_ratio = 0.3", hardware=RTX).key


def test_h100_profile_sets_what_is_installed() -> None:
    """The profile's plugins are taken where they are installed."""
    spec = resolve(hardware=H100)

    assert (True, "flash2", ()) == (spec["plugin.fp8"], spec["attention.plugin"], spec.warnings)
    assert ("flash2",) == spec.active


def test_h100_profile_degrades_with_a_warning() -> None:
    """What the profile asks for and nobody installed stays at the default, and a warning names it."""
    spec = resolve(hardware=H100, catalogue=BARE)

    assert (False, "auto") == (spec["plugin.fp8"], spec["attention.plugin"])
    assert ["fp8", "flash2"] == [name for name in ("fp8", "flash2") if any(name in w for w in spec.warnings)]
    assert 2 == len(spec.warnings)
    assert 1 == len(resolve('attention.plugin = "auto"', hardware=H100, catalogue=BARE).warnings)


@pytest.mark.parametrize("text", ["plugin.fp8 = true", 'attention.plugin = "flash2"', 'speculative.plugin = "medusa"'])
def test_operator_is_refused_where_a_profile_degrades(text: str) -> None:
    """What the operator asks for and nobody installed is refused with the known names."""
    assert "known: " in mistake(text, hardware=H100, catalogue=BARE).reason


@pytest.mark.parametrize("hardware", [CPU, A100])
def test_fp8_needs_a_device_with_fp8(hardware: Hardware) -> None:
    """FP8 on a device that has none is refused, for all plugins and for one."""
    assert hardware.name in mistake("plugin.fp8 = true", hardware=hardware).reason
    assert "plugins.medusa.fp8" == mistake("plugins.medusa.fp8 = true", hardware=hardware).key
    assert resolve("plugin.fp8 = true", hardware=RTX)["plugin.fp8"] is True


def test_over_committed_memory_is_spelled_out() -> None:
    """Shares that sum to more than the device are refused with the sum."""
    problem = mistake("kv_cache.memory_ratio = 0.7\nplugins.medusa.memory_ratio = 0.4\n")

    assert "over-committed: kv_cache 0.70 + medusa 0.40 = 1.10 > 1" == problem.reason
    assert "1.001" in mistake("kv_cache.memory_ratio = 0.601\nplugins.medusa.memory_ratio = 0.4\n").reason


@pytest.mark.parametrize(
    "text",
    [
        "kv_cache.memory_ratio = 0.6\nplugins.medusa.memory_ratio = 0.4\n",
        'kv_cache.memory_ratio = 0.7\nplugins.medusa.memory_ratio = 0.4\nplugin.disable = "medusa"\n',
        'kv_cache.memory_ratio = 0.7\nplugins.medusa.memory_ratio = 0.4\nplugin.disable = "everything"\n',
        "plugins.medusa.memory_ratio = 1\n",
        "kv_cache.memory_ratio = 0.4\nplugin.memory_ratio = 0.35\n[plugins]\nmedusa = {}\nfp8.memory_ratio = 0.25\n",
    ],
)
def test_memory_that_fits(text: str) -> None:
    """Shares may sum to the whole device; a plugin that is off holds none."""
    assert resolve(text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("above the advised 0.4:", "kv_cache.memory_ratio = 0.41"),
        ("plugin.batch_window = 16ms is above the advised 15ms: latency rises", 'plugin.batch_window = "16ms"'),
        ("plugins.medusa.batch_window = 1s", 'plugins.medusa.batch_window = "1s"'),
        ("acceptance falls", "speculative.tokens = 7"),
        ("advised 8GiB", 'kv_cache.max_layer_bytes = "9GiB"'),
    ],
)
def test_risky_value_warns(words: str, text: str) -> None:
    """A value beyond the advised one is taken, with one warning that says what to expect."""
    (warning,) = resolve(text).warnings

    assert words in warning


def test_advised_values_do_not_warn() -> None:
    """The edge of the advised range is inside it."""
    text = 'kv_cache.memory_ratio = 0.40\nplugin.batch_window = "15ms"\nspeculative.tokens = 6\n'

    assert () == resolve(text).warnings


# --- changes while serving --------------------------------------------------------------------------------------------


def test_live_change() -> None:
    """A change makes a new spec, shows where it came from, and leaves the old one alone."""
    old = resolve("kv_cache.memory_ratio = 0.4\nplugins.medusa.heads = 3\n")
    new = old.evolve({"kv_cache.memory_ratio": 0.3, "plugins.medusa.heads": 2}, catalogue=FULL)

    assert (0.4, 0.3) == (old["kv_cache.memory_ratio"], new["kv_cache.memory_ratio"])
    assert "set while serving" == str(new.value("plugins.medusa.heads").source)
    assert "chunkllm.toml:2" == str(new.value("plugins.medusa").source)
    assert old.evolve(["kv_cache.memory_ratio=0.3", "plugins.medusa.heads=2"], catalogue=FULL) == new
    assert old.config_hash() != new.config_hash()


LIVE = {
    "attention.plugin": "flash2",
    "kv_cache.memory_ratio": 0.2,
    "plugin.batch_window": "9ms",
    "speculative.plugin": "none",
    "speculative.tokens": 2,
    "plugin.priority": 3,
    "plugin.error_rate": 0.5,
    "plugin.cache.ttl": "1h",
    "plugin.latency.p99": "90ms",
    "plugins.<name>.priority": 4,
    "plugins.<name>.error_rate": 0.4,
    "plugins.<name>.<own key>": 5,
}


@pytest.mark.parametrize("key", live_keys())
def test_live_keys_can_change(key: str) -> None:
    """Every key of `live_keys` can be changed while serving."""
    real = key.replace("<name>", "medusa").replace("<own key>", "heads")

    assert "live" == resolve("[plugins.medusa]").evolve({real: LIVE[key]}, catalogue=FULL).value(real).source.kind


FIXED: dict[str, Any] = {
    "kv_cache.strategy": "paged",
    "kv_cache.max_layer_bytes": "1GiB",
    "plugin.memory_ratio": 0.1,
    "plugin.fp8": False,
    "rollback.config": "x",
    "plugin.disable": "all",
    "profile": "gpu",
    "plugins.medusa.memory_ratio": 0.1,
    "plugins.medusa.batch_window": "9ms",
}


@pytest.mark.parametrize("key", FIXED)
def test_fixed_keys_are_refused_with_the_live_ones(key: str) -> None:
    """A key that cannot change while serving is refused with those that can."""
    with pytest.raises(ConfigError) as caught:
        resolve("[plugins.medusa]").evolve({key: FIXED[key]}, catalogue=FULL)

    (problem,) = caught.value.problems
    assert (key, "set while serving") == (problem.key, problem.where)
    assert all(live in problem.reason for live in live_keys())


def test_every_parameter_is_live_or_fixed() -> None:
    """The two lists above forget no parameter."""
    assert {*PARAMETERS} == {key for key in (*LIVE, *FIXED) if not key.startswith("plugins.")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache.memry_ratio": 0.3}, "did you mean kv_cache.memory_ratio"),
        ({"kv_cache.memory_ratio": 2}, "at most 1"),
        ({"kv_cache.memory_ratio": 0.9}, "over-committed"),
        ({"speculative.tokens": 5}, "made room for 4 at start"),
        ({"speculative.tokens": 0}, "speculative.plugin = none turns drafting off"),
        ({"speculative.plugin": "medusa"}, "the engine was not launched to speculate; start it with this setting"),
        ({"plugins.medusa.heads": "3"}, "did you mean 3"),
        ({"plugins.flash2.priority": 3}, "not active"),
        ({"attention.plugin": "needy"}, "plugins.needy.path: is required"),
        ({"plugin.hot_reload": "medusa"}, "chunkllm reload"),
    ],
)
def test_live_change_is_checked_as_at_start(changes: dict[str, Any], words: str) -> None:
    """A bad change is refused for the same reasons as at start, and the old spec goes on."""
    spec = resolve("plugins.medusa.memory_ratio = 0.4")
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        spec.evolve(changes, catalogue=FULL)


def test_draft_tokens_move_within_the_room_made_at_start() -> None:
    """Draft tokens can go down and up again, to what the engine made room for."""
    spec = resolve("speculative.tokens = 4")
    for tokens in (2, 4):
        spec = Spec.from_wire(spec.evolve({"speculative.tokens": tokens}, catalogue=FULL).to_wire())

    assert 4 == spec["speculative.tokens"]


def test_the_draft_source_of_the_launch_can_be_turned_off_and_on() -> None:
    """It keeps its seat and its settings meanwhile; over the wire, too."""
    spec = resolve("speculative.plugin = 'medusa'")
    off = Spec.from_wire(spec.evolve({"speculative.plugin": "none"}, catalogue=FULL).to_wire())
    on = off.evolve({"plugins.medusa.heads": 2, "speculative.plugin": "medusa"}, catalogue=FULL)

    assert (None, ("medusa",), "medusa") == (off["speculative.plugin"], off.active, off.drafter)
    assert ("medusa", 2) == (on["speculative.plugin"], on["plugins.medusa.heads"])
    assert spec.config_hash() != off.config_hash()


def test_another_draft_source_needs_a_restart() -> None:
    """Also while the one of the launch is turned off."""
    off = resolve("speculative.plugin = 'medusa'").evolve({"speculative.plugin": "none"}, catalogue=FULL)
    with pytest.raises(ConfigError, match="the engine was launched with medusa; another draft source needs a restart"):
        off.evolve({"speculative.plugin": "needy"}, catalogue=FULL)


def test_settings_of_a_draft_source_that_is_off_are_checked() -> None:
    """What it will be turned on with must be right."""
    off = resolve("speculative.plugin = 'medusa'").evolve({"speculative.plugin": "none"}, catalogue=FULL)
    with pytest.raises(ConfigError, match=r"plugins\.medusa\.heads"):
        off.evolve({"plugins.medusa.heads": "x"}, catalogue=FULL)


def test_live_switch_of_attention_changes_what_is_active() -> None:
    """After a switch the new strategy is active and the old one is not; its settings can come along."""
    spec = resolve('attention.plugin = "flash2"')
    changes = {"attention.plugin": "needy", "plugins.needy.path": "x", "plugins.needy.size": 3}

    assert ("needy",) == spec.evolve(changes, catalogue=FULL).active
    assert () == spec.evolve({"attention.plugin": "paged"}, catalogue=FULL).active


def test_nested_tables_are_laid_over() -> None:
    """A part of a plugin's nested table can be set without losing the rest."""
    text = "[plugins.medusa.rules]\na = {weight = 1.0, word = 'x'}\n"
    sets = (
        "plugins.medusa.rules.a.weight=2",
        "plugins.medusa.rules.a.word=y",
        "plugins.medusa.rules.b={weight=3}",
    )

    assert {"a": {"weight": 2, "word": "y"}, "b": {"weight": 3}} == resolve(text, *sets)["plugins.medusa.rules"]


# --- frozen, carried, shown -------------------------------------------------------------------------------------------

RICH = """attention.plugin = "flash2"
plugin.disable = ["fp8", "needy"]
plugin.batch_window = "12.5ms"
kv_cache = {memory_ratio = 0.5, max_layer_bytes = 1000}
speculative.plugin = "medusa"
[plugins.medusa]
priority = 60
cache.ttl = "36h"
layers = [1, 2]
label = 'say "3"\\n'
words = ["a", "b c", ""]
rules."a.b" = {weight = 1e30}
[plugins.flash2]
"""


def test_spec_is_frozen() -> None:
    """Nothing of a spec can be changed, and what it hands out are copies."""
    spec = resolve(RICH)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.slots = 9  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.values["plugin.priority"] = Value(1, Source("default"))  # type: ignore[index]
    spec["plugins.medusa.layers"].append(3)
    spec["plugins.medusa.rules"]["c"] = 1
    spec.plugin_config("medusa")["rules"]["a.b"]["weight"] = 1

    assert resolve(RICH) == spec
    assert hash(resolve(RICH)) == hash(spec)


@pytest.mark.parametrize("hardware", [CPU, A100, H100, RTX])
@pytest.mark.parametrize("text", ["", 'plugin.memory_ratio = 0.1\nspeculative.plugin = "medusa"'])
def test_wire_round_trip(hardware: Hardware, text: str) -> None:
    """A spec goes through JSON, pickle and copy and comes back equal, sources and warnings included."""
    spec = resolve(text, "speculative.tokens=9", hardware=hardware)
    for other in (
        Spec.from_wire(json.loads(json.dumps(spec.to_wire(), allow_nan=False))),
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
    ):
        assert spec == other
        assert spec.rows() == other.rows()
        assert spec.warnings == other.warnings
        assert spec.config_hash() == other.config_hash()
        assert [type(spec[key]) for key in PARAMETERS] == [type(other[key]) for key in PARAMETERS]


def test_rich_wire_round_trip() -> None:
    """So does one with lists, tables, quotes and a live change."""
    spec = resolve(RICH).evolve({"plugins.medusa.rules": {"x": {"weight": 0.5}}}, catalogue=FULL)

    assert spec == Spec.from_wire(json.loads(json.dumps(spec.to_wire())))


def test_wire_of_another_version_is_refused() -> None:
    """A spec in another schema, or without all parameters, is not half read."""
    wire = resolve().to_wire()
    short = {**wire, "values": {k: v for k, v in wire["values"].items() if k != "plugin.priority"}}
    for other in ({**wire, "schema": 99}, short):
        with pytest.raises(ValueError, match="another version"):
            Spec.from_wire(other)


def test_hash_is_of_effects_alone(tmp_path: Path) -> None:
    """The hash changes with any effective value, and not with sources or with where the files lie (vllm#26299)."""
    here, there = resolve("plugin.priority = 60"), resolve(None, "plugin.priority=60", file=tmp_path / "x.toml")

    assert here.config_hash() == there.config_hash()
    assert 12 == len(here.config_hash())
    assert here.config_hash() != resolve("plugin.priority = 61").config_hash()
    assert here.config_hash() != resolve("plugin.priority = 60\n[plugins.medusa]").config_hash()


@pytest.mark.parametrize("text", ["", RICH, "plugins.medusa = {}\nplugins.batch_window.priority = 1"])
def test_rows_can_be_given_again(text: str) -> None:
    """What `config show` prints is what an operator would write: given on a launch line it has the same effect."""
    spec = resolve(text, hardware=RTX)
    again = [f"{key}={value}" for key, value, source in spec.rows() if source != "a command"]

    assert spec.config_hash() == resolve(None, *again, hardware=RTX).config_hash()
    assert "plugins.medusa.cache.ttl=36h" in again or text != RICH


def test_rows_follow_the_manual() -> None:
    """Every parameter is shown, in the manual's order, then the plugins'."""
    keys = [key for key, _, _ in resolve(RICH).rows()]

    assert ["attention.plugin", "kv_cache.strategy", "kv_cache.memory_ratio"] == keys[:3]
    assert keys.index("rollback.config") + 1 == keys.index("plugin.hot_reload")
    assert {*PARAMETERS} <= {*keys}
    assert keys.index("plugins.medusa.priority") > keys.index("profile")


@given(st.floats(1e-6, 1e9))
@CALM
def test_spans_are_shown_as_they_are_read(seconds: float) -> None:
    """Reading what is shown gives the same duration."""
    assert seconds == spelling.span("ms")(spelling.show_span(seconds))


@given(st.integers(1, 2**60))
@CALM
def test_sizes_are_shown_as_they_are_read(size: int) -> None:
    """Reading what is shown gives the same size."""
    assert size == spelling.size(spelling.from_text(spelling.show_size(size)))


TOML = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(TOML)
@CALM
def test_text_means_what_it_shows(value: Any) -> None:
    """Any value of a plugin, shown and read again, is the same."""
    assume("\\ud" not in json.dumps(value))  # TOML has no lone surrogates

    assert value == spelling.from_text(spelling.to_text(value))


@given(key=st.sampled_from(KEYS), value=TOML)
@settings(CALM, max_examples=400)
def test_any_value_is_taken_or_refused(key: str, value: Any) -> None:
    """Whatever is written to a key, it is refused as a ConfigError, or taken and carried to every process."""
    assume("\\ud" not in json.dumps(value))
    try:
        spec = resolve(f"{key} = {spelling.to_toml(value)}\n")
    except ConfigError as error:
        assert all(problem.where == "chunkllm.toml:1" for problem in error.problems)
        return
    again = [f"{key}={value}" for key, value, source in spec.rows() if source != "a command"]
    assert spec == Spec.from_wire(json.loads(json.dumps(spec.to_wire(), allow_nan=False)))
    assert spec.config_hash() == resolve(None, *again).config_hash()


# --- what is shipped --------------------------------------------------------------------------------------------------


def test_example_is_valid_without_third_party_plugins() -> None:
    """The example starts on a machine with no GPU and no third-party plugin, without a warning."""
    spec = Spec.resolve(file=ROOT / "examples/chunkllm.toml", hardware=CPU, catalogue=BARE)

    assert ("cpu", 0.05, 0.01, ()) == (
        spec.profile,
        spec["kv_cache.memory_ratio"],
        spec["plugin.batch_window"],
        spec.warnings,
    )


def test_example_names_every_parameter() -> None:
    """Every parameter stands in the example, in effect or as a comment."""
    spec = Spec.resolve(file=ROOT / "examples/chunkllm.toml", hardware=CPU, catalogue=BARE)
    text = (ROOT / "examples/chunkllm.toml").read_text()

    for key in PARAMETERS:
        head = key.removeprefix("plugin.") if key.startswith("plugin.") else key.rsplit(".", 1)[-1]
        assert spec.value(key).source.kind == "file" or f"# {head} =" in text


def test_manual_names_every_parameter() -> None:
    """The operator's page has a row for every parameter, with its default and whether it is live."""
    page = (ROOT / "docs/configuration.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|") for line in page.splitlines() if line.startswith("| `")}

    for key, parameter in PARAMETERS.items():
        row = rows[f"`{key}`"]
        assert ("yes" if parameter.live else "no") == row[4].strip()
        if parameter.default is not None or key.startswith(("plugin", "spec")):
            assert f"`{parameter.shows(parameter.default)}`" == row[2].strip()
    assert "`plugin.hot_reload`" in rows
    assert all(f"`{key}`" in page for key in EACH)


@pytest.mark.parametrize("off", ["all", "everything", "gpu_only", ["gpu_only"]])
def test_a_disabled_plugin_need_not_import(off: object):
    """A plugin that is switched off refuses nothing, even where it cannot be imported."""
    catalogue = attrs.evolve(BARE, broken=frozenset({"gpu_only"}), heavy=frozenset({"gpu_only"}))

    spec = Spec.resolve(
        file=None,
        text=f"plugin.disable = {off!r}\n[plugins.gpu_only]\nsize = 3\n",
        hardware=CPU,
        catalogue=catalogue,
    )

    assert ("gpu_only",) == spec.active


def test_an_installed_plugin_that_may_not_be_named_says_why():
    """A plugin outside the allow-list is not called unknown."""
    catalogue = attrs.evolve(BARE, refused={"mine": "not in CHUNKLLM_PLUGINS"})

    with pytest.raises(ConfigError, match="mine: installed, but not in CHUNKLLM_PLUGINS"):
        Spec.resolve(file=None, text="[plugins.mine]\n", hardware=CPU, catalogue=catalogue)


class TestTooMuch:
    """The engine waits while a change is read: whatever is sent, it does not wait long."""

    @pytest.mark.parametrize(
        "change",
        [
            {"x" * 100_000: 1},
            {"a" + ".a" * 3000: 1},
            {"kv_cache": {f"a{number}": 1 for number in range(5000)}},
            {"attention.plugin": "x" * 50_000},
            {"plugins": {"x" * 50_000: {}}},
        ],
        ids=["a long key", "a deep key", "many keys", "a long name", "a long plugin"],
    )
    def test_it_is_refused_at_once(self, change: dict[str, Any]) -> None:
        started = time.monotonic()
        with pytest.raises(ConfigError):
            resolve("").evolve(change, catalogue=FULL)

        assert time.monotonic() - started < 2


@pytest.mark.parametrize("window", ["1min", "1h"])
def test_a_window_that_no_plan_can_have_is_refused_at_once(window: str) -> None:
    """Not only once the model is loaded."""
    with pytest.raises(ConfigError, match="must be below 1min"):
        resolve(f'[plugin]\nbatch_window = "{window}"')
