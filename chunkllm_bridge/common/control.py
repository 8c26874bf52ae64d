"""The commands that reach a running engine, as typed messages, and the desks that carry them out on every rank.

A change is prepared on all ranks, then committed on all at a step boundary, or on none. The adapter calls a desk only
between two steps; nothing here waits for a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import cattrs

from chunkllm_bridge.common.drafts import Drafting, check_speculation
from chunkllm_bridge.common.errors import BridgeError, ConfigError, ControlError
from chunkllm_bridge.common.generations import Pending
from chunkllm_bridge.common.host import Host
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.snapshots import Snapshots
from chunkllm_bridge.common.spec import Spec

log = get_logger("control")


# ---- messages ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Status:
    """What the engine holds and what each plugin did; with `workers`, on all ranks."""

    workers: bool = True


@attrs.frozen
class Config:
    """The effective value of every parameter and where it came from."""


@attrs.frozen
class Plugins:
    """The plugins that are installed, and which of them have a seat."""


@attrs.frozen
class Set:
    """Change parameters on all ranks at the next step boundary."""

    values: dict[str, Any]  # dotted key -> value, as in the spec file
    rehearse: bool = False  # prepare on all ranks, then change nothing: says whether it would be refused


Command = Status | Config | Plugins | Set
COMMANDS: Mapping[str, type[Command]] = {"status": Status, "config": Config, "plugins": Plugins, "set": Set}


@attrs.frozen(kw_only=True)
class Reply:
    """The answer to a command; `status` is the HTTP status that says the same."""

    data: dict[str, Any] = attrs.field(factory=dict)
    error: str = ""
    status: int = 200


def merge(replies: Sequence[Reply]) -> Reply:
    """Several engines' answers as one: the first that failed, or the first of all with every one under "engines"."""
    failed = next((reply for reply in replies if reply.error), None)
    if failed is not None or len(replies) == 1:
        return failed or replies[0]
    return Reply(data={**replies[0].data, "engines": [reply.data for reply in replies]})


def _flag(value: object, _: type) -> bool:
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


_STRICT = cattrs.Converter(forbid_extra_keys=True)
_STRICT.register_structure_hook(bool, _flag)  # bool("no") is True


def encode(command: Command) -> dict[str, Any]:
    name = next(name for name, kind in COMMANDS.items() if type(command) is kind)
    return {"command": name, **attrs.asdict(command)}


def decode(message: Mapping[str, Any]) -> Command:
    """The command in a message. Raises `ControlError` for anything that is not exactly one."""
    if not isinstance(message, Mapping):
        raise ControlError(f"a command is an object, not {type(message).__name__}")
    body = dict(message)
    kind = COMMANDS.get(name := str(body.pop("command", "")))
    if kind is None:
        raise ControlError(f"unknown command {name!r} (known: {', '.join(COMMANDS)})", 404)
    try:
        return _STRICT.structure(body, kind)
    except Exception as error:  # cattrs raises a group of several kinds; all of them mean a malformed message
        raise ControlError(f"malformed {name} command: {'; '.join(cattrs.transform_error(error))}") from None


# ---- a rank --------------------------------------------------------------------------------------------------------


class RankDesk:
    """One worker's part: prepares and commits what the core desk decides."""

    def __init__(self, host: Host, drafting: Drafting | None = None) -> None:
        self.host, self.drafting = host, drafting
        self._pending: Pending | None = None

    def handle(self, verb: str, wire: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Carry out "prepare" (with the new spec), "commit", "abandon" or "report". A refusal is a reply."""
        try:
            return {"ok": True, **self._do(verb, wire)}
        except BridgeError as error:
            return {"ok": False, "error": str(error), "rank": self.host.info.rank}
        except Exception as error:  # a bug of ours must not end the worker; the core desk tells who asked
            log.exception("control.failed", verb=verb)
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "rank": self.host.info.rank}

    def _do(self, verb: str, wire: Mapping[str, Any] | None) -> dict[str, Any]:
        if verb == "report":
            drafts = {} if self.drafting is None else {"drafts": self.drafting.report()}
            return {**self.host.report(), **drafts}
        pending, self._pending = self._pending, None
        if pending is not None and verb != "commit":
            self.host.abandon(pending)
        if verb == "prepare":
            assert wire is not None
            self._pending = self.host.prepare(Spec.from_wire(wire))
        elif verb == "commit" and pending is not None:
            self.host.commit(pending)
        return {"rank": self.host.info.rank, "fingerprint": self.host.fingerprint()}


class Ranks(Protocol):
    """Runs `RankDesk.handle` on every worker, in rank order; the adapter's transport."""

    def __call__(self, verb: str, wire: Mapping[str, Any] | None = None) -> Sequence[Mapping[str, Any]]: ...


# ---- the core ------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Ports:
    """What the core desk needs from its engine."""

    ranks: Ranks
    pool: Callable[[], dict[str, Any]]  # the "kv" part of the status
    requests: Callable[[], dict[str, Any]]  # the "requests" part
    check: Callable[[Spec], None] = lambda spec: None  # raises ControlError for what the pool cannot hold
    committed: Callable[[], None] = lambda: None  # called right after a change, before the next step


class CoreDesk:
    """Carries out commands in the process that schedules, for all ranks of one engine."""

    def __init__(self, host: Host, ports: Ports, snapshots: Snapshots | None = None) -> None:
        self.host, self.ports, self.snapshots = host, ports, snapshots
        self._workers: list[Mapping[str, Any]] = []  # the ranks' last reports

    def handle(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one message, as plain data. Refusals are replies, never exceptions: the engine must live on."""
        try:
            reply = self._do(decode(message))
        except ConfigError as error:
            problems = [str(problem) for problem in error.problems]
            reply = Reply(error=str(error), status=422, data={"problems": problems})
        except ControlError as error:
            reply = Reply(error=str(error), status=error.status)
        except BridgeError as error:
            reply = Reply(error=str(error), status=409)
        except Exception as error:  # a bug of ours must not end the engine; it is shown to who asked, and logged
            log.exception("control.failed", command=message.get("command"))
            reply = Reply(error=f"{type(error).__name__}: {error}", status=500)
        return attrs.asdict(reply)

    def _do(self, command: Command) -> Reply:
        match command:
            case Status(workers=workers):
                return Reply(data=self.status(workers=workers))
            case Config():
                rows = [{"key": key, "value": value, "source": source} for key, value, source in self.host.spec.rows()]
                return Reply(data={"profile": self.host.spec.profile, "parameters": rows})
            case Plugins():
                return Reply(data={"plugins": self.plugins()})
            case Set(values=values, rehearse=rehearse):
                return Reply(data=self.set(values, rehearse=rehearse))

    def status(self, *, workers: bool = True) -> dict[str, Any]:
        info, report = self.host.info, self.host.report()
        if workers:
            self._workers = list(self.ports.ranks("report"))
        status = {
            "engine": info.engine,
            "version": info.version,
            "model": info.model,
            "profile": self.host.spec.profile,
            "fingerprint": report["fingerprint"],
            "generation": report["generation"],
            "ranks": info.world_size,
            "kv": self.ports.pool(),
            "requests": self.ports.requests(),
            "plugins": self._seated(report),
            "alarms": {"latency_p99": self.host.spec["plugin.latency.p99"]},
            "warnings": list(self.host.spec.warnings),
        }
        if "drafts" in (rank := self._drafting_rank()):
            status["speculation"] = rank["drafts"]
        if workers:
            status["workers"] = self._workers
            status["in_step"] = all(rank.get("fingerprint") == report["fingerprint"] for rank in self._workers)
        return status

    def _seated(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The plugins here, and those that have seats in the workers only, as one of them last said."""
        here, there = list(report["plugins"]), self._drafting_rank().get("plugins", ())
        names = {plugin["name"] for plugin in here}
        return [*here, *(plugin for plugin in there if plugin["name"] not in names)]

    def _drafting_rank(self) -> Mapping[str, Any]:
        """The last report of the rank that asks the plugins for drafts: the first of all, or the only one that does."""
        asked = [rank for rank in self._workers if rank.get("drafts", {}).get("drafts")]
        return next(iter([*asked, *self._workers]), {})

    def plugins(self) -> list[dict[str, Any]]:
        seated = {plugin["name"]: plugin for plugin in self._seated(self.host.report())}
        return [{**row, **seated.get(row["name"], {})} for row in self.host.registry.describe()]

    def set(self, values: Mapping[str, Any], *, rehearse: bool = False) -> dict[str, Any]:
        """Prepare on all ranks, then commit on all, or on none."""
        before = self.host.spec
        spec = before.evolve(values, catalogue=self.host.registry)
        check_speculation(spec, before, self.host.info)
        self.ports.check(spec)
        changed = changes(before, spec)
        pending = self.host.prepare(spec)
        with contextlib.ExitStack() as undo:
            undo.callback(self.host.abandon, pending)
            undo.callback(self.ports.ranks, "abandon")
            replies = self.ports.ranks("prepare", spec.to_wire())
            if refusals := [f"rank {reply.get('rank')}: {reply.get('error')}" for reply in replies if not reply["ok"]]:
                raise ControlError("\n".join(["refused, nothing changed:", *refusals]), 409)
            undo.pop_all()
        if rehearse:
            self.ports.ranks("abandon")
            self.host.abandon(pending)
            return {"changed": changed, "generation": self.host.generation, "kv": self.ports.pool()}
        behind = [f"rank {r.get('rank')}: {r.get('error')}" for r in self.ports.ranks("commit") if not r["ok"]]
        self.host.commit(pending)
        self.ports.committed()
        if behind:  # it was prepared there, so this is a bug; what was decided stands here and is not to be a snapshot
            raise ControlError("\n".join(["changed, but not everywhere; restart the engine:", *behind]), 500)
        if self.snapshots is not None:
            self.snapshots.save(spec)
        log.info("control.set", generation=self.host.generation, changed=changed)
        return {"changed": changed, "generation": self.host.generation, "kv": self.ports.pool()}


def changes(before: Spec, after: Spec) -> dict[str, dict[str, str | None]]:
    """Parameter -> its effective value before and after, as text."""
    old = {key: value for key, value, _ in before.rows()}
    return {key: {"before": old.get(key), "after": value} for key, value, _ in after.rows() if old.get(key) != value}
