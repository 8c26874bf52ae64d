"""What is counted, under which Prometheus names, the same on every engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from chunkllm_bridge.common.acceptance import BOUNDS

PREFIX = "chunkllm_"


@attrs.frozen
class Family:
    """One metric: its name without the prefix, kind, labels beside `engine`, and help text."""

    name: str
    kind: str  # "gauge" or "counter"
    labels: tuple[str, ...]
    text: str


FAMILIES = (
    Family("info", "gauge", ("version", "fingerprint", "profile"), "1 while the bridge is attached."),
    Family("generation", "gauge", (), "Commits of the spec in this engine, counted from 1."),
    Family("ranks_in_step", "gauge", (), "1 while all ranks report the fingerprint of the scheduling process."),
    Family("kv_blocks", "gauge", ("state",), "KV blocks by state: free, held (by requests), cached (evictable)."),
    Family("kv_total_blocks", "gauge", (), "KV blocks that requests could hold without a quota."),
    Family("kv_limit_blocks", "gauge", (), "KV blocks that requests may hold together now."),
    Family("kv_peak_blocks", "gauge", (), "Most blocks held since the limit last changed."),
    Family("kv_conserved", "gauge", (), "1 while free + held + cached == total."),
    Family("kv_denied", "counter", (), "Block allocations that the quota refused; the request waits or is preempted."),
    Family("kv_preempted", "counter", (), "Requests preempted because the quota was lowered below what was held."),
    Family("kv_overdrafts", "counter", (), "Allocations beyond the quota for a request that was alone."),
    Family("kv_violations", "counter", (), "Steps that ended above the quota without the sole-request rule."),
    Family("requests", "gauge", ("state",), "Requests in the scheduler by state: running, waiting."),
    Family("batch_holds", "counter", (), "Scheduler steps in which new prefills were held by the batch window."),
    Family("plugin_active", "gauge", ("plugin", "generation"), "1 once the plugin was called on the step path."),
    Family("plugin_calls", "counter", ("plugin", "verb"), "Calls of plugin code."),
    Family("plugin_failures", "counter", ("plugin", "kind"), "Calls that failed: the engine went its own way."),
    Family("plugin_skipped", "counter", ("plugin",), "Steps in which the plugin was not asked: budget spent."),
    Family("plugin_seconds", "counter", ("plugin",), "Time spent in plugin code, in seconds."),
    Family("plugin_memory_bytes", "gauge", ("plugin",), "Device memory that the plugin leases."),
    Family("spec_drafts", "counter", (), "Drafts verified: one per request and step that had draft tokens."),
    Family("spec_draft_tokens", "counter", (), "Draft tokens verified."),
    Family("spec_accepted_tokens", "counter", (), "Draft tokens that the model agreed with."),
    Family("spec_accepted_at", "counter", ("position",), "Drafts right up to this position, counted from 1."),
    Family("spec_source_drafts", "counter", ("source",), "Drafts verified, by what drafted them."),
    Family("spec_source_accepted_tokens", "counter", ("source",), "Accepted draft tokens, by what drafted them."),
    Family("spec_acceptance_length", "gauge", (), "Tokens per step with drafts, its own included, over a minute."),
    Family("spec_limit", "gauge", (), "Draft tokens on one path that may be verified now; 0: speculation is off."),
    Family("spec_width", "gauge", (), "Draft tokens per request in the last step that could have had drafts."),
    Family("spec_stepped_aside", "gauge", (), "1 while the draft source stepped aside: its drafts were of no use."),
    Family("itl_p99_seconds", "gauge", (), "p99 of inter-token latency over the last minute."),
    Family("itl_alarm", "gauge", (), "1 while that p99 is above plugin.latency.p99."),
    Family("itl_alarms", "counter", (), "Times that the alarm rose."),
)

REQUEST_LENGTH = "spec_request_acceptance_length"
ITL = "inter_token_latency_seconds"
ITL_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)

SPEC_SERIES = (
    ("spec_drafts", "drafts"),
    ("spec_draft_tokens", "draft_tokens"),
    ("spec_accepted_tokens", "accepted"),
    ("spec_acceptance_length", "acceptance_length"),
    ("spec_limit", "limit"),
    ("spec_width", "width"),
)

Sample = tuple[str, dict[str, str], float]


def samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    """(name, labels, value) of all that a status says."""
    labels = {key: str(status[key]) for key in ("version", "fingerprint", "profile")}
    yield "info", labels, 1
    yield "generation", {}, status["generation"]
    if "in_step" in status:
        yield "ranks_in_step", {}, status["in_step"]
    kv = status["kv"]
    for state in ("free", "held", "cached"):
        yield "kv_blocks", {"state": state}, kv[state]
    yield "kv_total_blocks", {}, kv["total"]
    yield "kv_limit_blocks", {}, kv["limit"]
    yield "kv_peak_blocks", {}, kv["peak"]
    yield "kv_conserved", {}, kv["conserved"]
    for name in ("denied", "preempted", "overdrafts", "violations"):
        yield f"kv_{name}", {}, kv[name]
    for state, number in status["requests"].items():
        yield "requests", {"state": state}, number
    yield "batch_holds", {}, kv["window_holds"]
    for plugin in status["plugins"]:
        if plugin["state"] != "disabled":
            yield from _plugin_samples(plugin)
    if "speculation" in status:
        drafts = status["speculation"]
        for name, key in SPEC_SERIES:
            yield name, {}, drafts[key]
        yield "spec_stepped_aside", {}, bool(drafts["stepped_aside"])
        for source, count in drafts["sources"].items():
            yield "spec_source_drafts", {"source": source}, count["drafts"]
            yield "spec_source_accepted_tokens", {"source": source}, count["accepted"]
        for position, number in enumerate(drafts["accepted_at"], 1):
            yield "spec_accepted_at", {"position": str(position)}, number


def _plugin_samples(plugin: Mapping[str, Any]) -> Iterator[Sample]:
    name = {"plugin": plugin["name"]}
    yield "plugin_active", {**name, "generation": str(plugin["generation"])}, plugin["state"] == "active"
    for verb, calls in plugin["calls"].items():
        yield "plugin_calls", {**name, "verb": verb}, calls
    for kind, failures in plugin["failures"].items():
        yield "plugin_failures", {**name, "kind": kind}, failures
    yield "plugin_skipped", name, plugin["skipped"]
    yield "plugin_seconds", name, plugin["seconds"]
    yield "plugin_memory_bytes", name, plugin["memory_bytes"]


class Exporter:
    """Publishes samples through prometheus_client.

    With several API servers exactly one of them publishes what the engine counted: then summing the counters of all
    processes is right. What each server sees itself (latencies) it publishes itself. Create it after the engine has
    set PROMETHEUS_MULTIPROC_DIR.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._seen: dict[tuple[str, ...], float] = {}
        self._last: dict[str, set[tuple[str, ...]]] = {}
        self._lengths_seen: dict[str, list[Sequence[float]]] = {}  # by engine
        for family in FAMILIES:
            names = ["engine", *family.labels]
            if family.kind == "gauge":
                self._gauges[family.name] = Gauge(
                    PREFIX + family.name,
                    family.text,
                    names,
                    registry=registry,
                    multiprocess_mode="livemax" if family.name.startswith("itl_") else "livemostrecent",
                )
            else:
                self._counters[family.name] = Counter(PREFIX + family.name, family.text, names, registry=registry)
        self._lengths = Histogram(
            PREFIX + REQUEST_LENGTH,
            "Acceptance length of each request that ended.",
            ["engine"],
            registry=registry,
            buckets=BOUNDS,
        )
        self._itl = Histogram(
            PREFIX + ITL, "Time between two tokens of a request.", ["engine"], registry=registry, buckets=ITL_BUCKETS
        )

    def publish(self, rows: Iterable[Sample], engine: str) -> None:
        """Set the gauges, and add to the counters what came since the last call.

        A new generation of a plugin counts from zero; so does whatever went down.
        """
        fresh: dict[str, set[tuple[str, ...]]] = {}
        for name, labels, value in rows:
            values = (engine, *labels.values())
            if name == "plugin_active" and values not in self._last.get(name, ()):
                self._forget(*values[:2])
            if name in self._gauges:
                self._gauges[name].labels(*values).set(float(value))
                fresh.setdefault(name, set()).add(values)
                continue
            key = (name, *values)
            before = self._seen.get(key, 0.0)
            self._seen[key] = float(value)
            self._counters[name].labels(*values).inc(float(value) - before if value >= before else float(value))
        for name in ("info", "plugin_active"):  # labels that change must not leave the old series behind
            if name in fresh:
                for gone in self._last.get(name, set()) - fresh[name]:
                    if gone[0] == engine:
                        self._retire(name, gone)
                others = {values for values in self._last.get(name, set()) if values[0] != engine}
                self._last[name] = others | fresh[name]

    def _retire(self, name: str, values: tuple[str, ...]) -> None:
        """A series that is no more. In multi-process mode prometheus_client cannot remove one, so it stays at 0."""
        self._gauges[name].labels(*values).set(0)
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._gauges[name].remove(*values)

    def _forget(self, engine: str, plugin: str) -> None:
        self._seen = {key: value for key, value in self._seen.items() if key[1:3] != (engine, plugin)}

    def publish_lengths(self, buckets: Sequence[Sequence[float]], engine: str) -> None:
        """Add the requests that ended since the last call; `buckets`: how many ever, and the sum of their lengths."""
        before = self._lengths_seen.get(engine) or [(0, 0.0)] * len(buckets)
        if any(now[0] < old[0] for now, old in zip(buckets, before, strict=True)):
            before = [(0, 0.0)] * len(buckets)  # an engine that started anew
        self._lengths_seen[engine] = [tuple(bucket) for bucket in buckets]
        histogram = self._lengths.labels(engine)
        for index, ((count, total), (old_count, old_total)) in enumerate(zip(buckets, before, strict=True)):
            fresh = int(count - old_count)
            for _ in range(fresh):
                mean = (total - old_total) / fresh
                histogram.observe(min(mean, BOUNDS[index]) if index < len(BOUNDS) else mean)

    def observe_itl(self, seconds: list[float], engine: str) -> None:
        histogram = self._itl.labels(engine)
        for value in seconds:
            histogram.observe(value)
