"""Commands as messages, and the desks that carry them out on all ranks or on none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from chunkllm_bridge import BlocksPlan, BlocksStep, DraftsPlan, DraftsStep, Plugin, PluginSpec, Preparation, Seam
from chunkllm_bridge.common.control import Config, CoreDesk, Plugins, Ports, Reply, Set, Status, decode, encode, merge
from chunkllm_bridge.common.errors import ControlError
from chunkllm_bridge.common.snapshots import Snapshots
from chunkllm_bridge.common.testing import FakeBridge, FakeEngine, attach


@attrs.frozen(kw_only=True)
class Size:
    size: int = 5


class Mine(Plugin):
    """Sits in the core and in every worker; a worker's refuses a size of 13."""

    spec = PluginSpec(name="mine", version="1", abi=(1, 0), seams={Seam.BLOCKS, Seam.DRAFTS})
    Config = Size

    def prepare(self, preparation: Preparation) -> None:
        preparation.lease_memory(self.config.size)
        if preparation.info.role == "worker" and preparation.info.rank == 1 and self.config.size == 13:
            raise ValueError("thirteen")

    def plan_blocks(self, step: BlocksStep) -> BlocksPlan:
        return BlocksPlan(limit=self.config.size)

    def plan_drafts(self, step: DraftsStep) -> None:
        return None


@pytest.fixture
def bridge() -> FakeBridge:
    return attach(FakeEngine(ranks=3), {"plugins.mine.size": 5}, Mine)


def sizes(bridge: FakeBridge) -> list[Any]:
    """In the core, then on every rank: config, and bytes leased."""
    hosts = [bridge.host, *(desk.host for desk in bridge.workers.desks)]
    return [(host._seated["mine"].plugin.config.size, host.memory.counts.held) for host in hosts]


class TestMessages:
    @pytest.mark.parametrize(
        "command", [Status(), Status(workers=False), Config(), Plugins(), Set({"a.b": [1, 2.5, None]})]
    )
    def test_what_is_encoded_is_decoded(self, command: Any) -> None:
        assert command == decode(encode(command))

    @pytest.mark.parametrize(
        "message",
        [
            {"command": "status", "worker": True},
            {"command": "status", "workers": "no"},
            {"command": "status", "workers": None},
            {"command": "set"},
            {"command": "set", "values": None},
            {"command": "set", "values": [["kv_cache.memory_ratio", 0.1]]},
            {"command": "config", "values": {}},
        ],
    )
    def test_a_malformed_message_is_refused(self, message: dict[str, Any]) -> None:
        """Nothing is guessed: "no" is not a flag, an unknown field not a spelling."""
        with pytest.raises(ControlError, match="malformed") as caught:
            decode(message)

        assert 400 == caught.value.status

    @pytest.mark.parametrize("message", [{}, {"command": "stop"}, {"command": None}, {"command": ["set"]}])
    def test_an_unknown_command_is_answered_with_the_known(self, message: dict[str, Any]) -> None:
        with pytest.raises(ControlError, match="known: status, config, plugins, set") as caught:
            decode(message)

        assert 404 == caught.value.status

    def test_several_engines_answer_as_one(self) -> None:
        """All of them together, or the first that failed."""
        one, two, bad = Reply(data={"n": 1}), Reply(data={"n": 2}), Reply(error="no", status=409)

        assert one == merge([one])
        assert Reply(data={"n": 1, "engines": [{"n": 1}, {"n": 2}]}) == merge([one, two])
        assert bad == merge([one, bad])


class TestReplies:
    @pytest.mark.parametrize("message", [[], None, "status", 7, {"command": "status", "x": 1}, {"command": "nothing"}])
    def test_no_message_ends_the_engine(self, bridge: FakeBridge, message: Any) -> None:
        """A refusal is a reply."""
        reply = bridge.desk.handle(message)

        assert reply["status"] in (400, 404)
        assert reply["error"]

    def test_a_bug_is_a_reply_too(self, bridge: FakeBridge) -> None:
        """It says what it was; the engine lives on."""
        broken = CoreDesk(bridge.host, attrs.evolve(bridge.desk.ports, pool=lambda: 1 / 0))

        reply = broken.handle({"command": "status"})

        assert (500, "ZeroDivisionError: division by zero") == (reply["status"], reply["error"])

    def test_a_rank_that_does_not_follow_is_told(self, bridge: FakeBridge) -> None:
        """It was prepared everywhere, so this is a bug of ours: it is not to pass for a change on all ranks."""
        ranks = bridge.desk.ports.ranks

        def limping(verb: str, wire: Mapping[str, Any] | None = None) -> Any:
            replies = ranks(verb, wire)
            return [*replies[:-1], {"ok": False, "rank": 2, "error": "lost"}] if verb == "commit" else replies

        desk = CoreDesk(bridge.host, attrs.evolve(bridge.desk.ports, ranks=limping))
        reply = desk.handle(encode(Set({"plugins.mine.size": 6})))

        assert 500 == reply["status"]
        assert "rank 2: lost" in reply["error"]

    def test_unknown_keys_are_answered_with_the_nearest(self, bridge: FakeBridge) -> None:
        """All mistakes at once, 422. Case: vllm#35573, unknown keys that fail silently."""
        reply = bridge.set({"kv_cache.memory_ration": 0.2, "plugins.mine.sise": 3, "plugin.priority": 100})

        assert 422 == reply["status"]
        problems = "\n".join(reply["data"]["problems"])
        assert 3 == len(reply["data"]["problems"])
        for part in ("kv_cache.memory_ration", "did you mean kv_cache.memory_ratio", "plugins.mine.size", "100"):
            assert part in problems

    @pytest.mark.parametrize("key", ["plugin.memory_ratio", "plugin.disable", "profile", "plugins.mine.memory_ratio"])
    def test_what_is_fixed_at_start_is_refused(self, bridge: FakeBridge, key: str) -> None:
        value = {"plugin.disable": "all", "profile": "gpu"}.get(key, 0.1)
        reply = bridge.set({key: value})

        assert 422 == reply["status"]
        assert "cannot change while serving" in reply["error"]

    def test_status_covers_all_ranks(self, bridge: FakeBridge) -> None:
        status = bridge.status()

        assert [0, 1, 2] == [worker["rank"] for worker in status["workers"]]
        assert status["in_step"] is True
        assert ("fake", 3, 1, 24, 5) == (
            *(status[key] for key in ("engine", "ranks", "generation")),
            *(status["kv"][key] for key in ("total", "limit")),
        )

    def test_a_rank_out_of_step_shows(self, bridge: FakeBridge) -> None:
        """Another fingerprint on one rank is no detail. Case: vllm#18326."""
        host = bridge.workers.desks[2].host
        host.commit(host.prepare(host.spec.evolve({"plugins.mine.size": 6}, catalogue=host.registry)))

        assert bridge.status()["in_step"] is False

    def test_config_and_plugins_say_what_is_in_effect(self, bridge: FakeBridge) -> None:
        """A plugin is active once a step has asked it; attaching alone makes none active (flash-head PR#2)."""
        config = bridge.desk.handle({"command": "config"})["data"]
        rows = {row["key"]: (row["value"], row["source"]) for row in config["parameters"]}

        def states() -> dict[str, str]:
            listed = bridge.desk.handle({"command": "plugins"})["data"]["plugins"]
            return {row["name"]: row["state"] for row in listed}

        before = states()
        bridge.engine.add(prompt=5, max_tokens=2)
        bridge.engine.run()

        assert ("5", "--plugin-set") == rows["plugins.mine.size"]
        rest = {"batch_window": "seated", "medusa": "installed"}
        assert {"mine": "seated", "paged_kv": "seated", **rest} == before
        assert {"mine": "active", "paged_kv": "active", **rest} == states()


class Drafter(Plugin):
    """Drafts the last token once more; sits in the workers only."""

    spec = PluginSpec(name="drafter", version="1", abi=(1, 1), seams={Seam.DRAFTS})

    def plan_drafts(self, step: DraftsStep) -> DraftsPlan:
        return DraftsPlan(tokens=step.last_tokens[:, None])


class TestSpeculation:
    @pytest.fixture
    def bridge(self) -> FakeBridge:
        bridge = attach(FakeEngine(ranks=2), {"speculative.plugin": "drafter"}, Drafter)
        bridge.engine.add(max_tokens=8)
        bridge.engine.run()
        return bridge

    def test_status_says_how_drafts_fare(self, bridge: FakeBridge) -> None:
        """And shows the plugin, which has no seat in the process that is asked."""
        status = bridge.status()

        assert status["workers"][0]["drafts"] == status["speculation"]
        assert ("drafter", 4, 4) == tuple(status["speculation"][key] for key in ("plugin", "limit", "launched"))
        assert 0 < status["speculation"]["drafts"]
        assert "active" == next(row for row in status["plugins"] if row["name"] == "drafter")["state"]

    def test_without_asking_the_workers_it_is_what_they_last_said(self, bridge: FakeBridge) -> None:
        """So that the series of a reading that does not disturb them does not break off."""
        alone = {"command": "status", "workers": False}
        assert "speculation" not in bridge.desk.handle(alone)["data"]
        full = bridge.status()

        assert full["speculation"] == bridge.desk.handle(alone)["data"]["speculation"]
        assert full["plugins"] == bridge.desk.handle(alone)["data"]["plugins"]

    def test_it_is_of_the_rank_that_drafts(self, bridge: FakeBridge) -> None:
        """With pipeline parallelism that is not the first."""
        ranks = bridge.desk.ports.ranks

        def last_drafts(verb: str, wire: Mapping[str, Any] | None = None) -> Any:
            replies = [dict(reply) for reply in ranks(verb, wire)]
            if verb == "report":
                replies[0]["drafts"] = {**replies[0]["drafts"], "drafts": 0}
            return replies

        desk = CoreDesk(bridge.host, attrs.evolve(bridge.desk.ports, ranks=last_drafts))

        assert 0 < desk.status()["speculation"]["drafts"]

    def test_off_and_on_on_all_ranks(self, bridge: FakeBridge) -> None:
        for name, limit in (("none", 0), ("drafter", 4)):
            assert "" == bridge.set({"speculative.plugin": name})["error"]
            assert [limit] * 2 == [rank["drafts"]["limit"] for rank in bridge.status()["workers"]]

    @pytest.mark.parametrize(
        ("values", "status", "words"),
        [
            ({"speculative.tokens": 5}, 422, "the engine made room for 4 at start"),
            ({"speculative.tokens": 0}, 422, "speculative.plugin = none turns drafting off"),
            ({"speculative.plugin": "medusa"}, 422, "launched with drafter; another draft source needs a restart"),
            ({"speculative.plugin": "paged_kv"}, 422, "paged_kv has no drafts seam"),
        ],
    )
    def test_what_cannot_be_is_refused(self, bridge: FakeBridge, values: Any, status: int, words: str) -> None:
        """With what to do, and nothing changes."""
        reply = bridge.set(values)

        assert (status, True) == (reply["status"], words in reply["error"])
        assert 4 == bridge.status()["speculation"]["limit"]

    def test_an_engine_that_was_not_launched_to_speculate(self) -> None:
        """It says so, whether the draft source was not named or was switched off."""
        for settings in ({"plugins.drafter": {}}, {"speculative.plugin": "drafter", "plugin.disable": "drafter"}):
            bridge = attach(FakeEngine(), settings, Drafter)
            name = "drafter" if "plugins.drafter" in settings else "none"
            bridge.set({"speculative.plugin": "none"})
            reply = bridge.set({"speculative.plugin": "drafter"})

            assert reply["status"] in (409, 422), name
            assert "not launched to speculate" in reply["error"]


class TestSet:
    def test_all_ranks_change_together(self, bridge: FakeBridge) -> None:
        """And the pool at once, before the next step."""
        reply = bridge.set({"plugins.mine.size": 7})

        assert (200, 2) == (reply["status"], reply["data"]["generation"])
        assert {"plugins.mine.size": {"before": "5", "after": "7"}} == reply["data"]["changed"]
        assert [(7, 7)] * 4 == sizes(bridge)
        assert 7 == bridge.quota.limit == reply["data"]["kv"]["limit"]
        assert bridge.status()["in_step"] is True

    @pytest.mark.parametrize("ranks", [{0}, {1}, {2}, {0, 1, 2}])
    def test_one_rank_refuses_and_none_changes(self, bridge: FakeBridge, ranks: set[int]) -> None:
        """Everybody goes on with the old config, and holds the old leases only. Case: kvcached#372, a failure in one
        rank that is swallowed."""
        bridge.engine.faults.refusing_ranks = ranks
        reply = bridge.set({"plugins.mine.size": 7})

        assert 409 == reply["status"]
        assert [f"rank {rank}: refuses on cue" for rank in sorted(ranks)] == reply["error"].splitlines()[1:]
        assert [(5, 5)] * 4 == sizes(bridge)
        assert (5, 1) == (bridge.quota.limit, bridge.host.generation)

    def test_a_plugin_that_refuses_on_one_rank_changes_none(self, bridge: FakeBridge) -> None:
        """Its reason comes back with the rank. Case: kvcached#372."""
        reply = bridge.set({"plugins.mine.size": 13})

        assert 409 == reply["status"]
        assert "rank 1" in reply["error"]
        assert "ValueError: thirteen" in reply["error"]
        assert [(5, 5)] * 4 == sizes(bridge)

    def test_a_refusal_is_no_obstacle_to_the_next_change(self, bridge: FakeBridge) -> None:
        bridge.set({"plugins.mine.size": 13})

        assert 200 == bridge.set({"plugins.mine.size": 8})["status"]
        assert [(8, 8)] * 4 == sizes(bridge)

    def test_a_line_that_breaks_changes_nothing(self, bridge: FakeBridge) -> None:
        """The ranks cannot be reached: the core gives back what it prepared, and says so."""

        def broken(verb: str, wire: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
            if verb == "prepare":
                raise ConnectionError("gone")
            return bridge.workers.handle(verb, wire)

        desk = CoreDesk(bridge.host, attrs.evolve(bridge.desk.ports, ranks=broken))
        reply = desk.handle({"command": "set", "values": {"plugins.mine.size": 7}})

        assert (500, "ConnectionError: gone") == (reply["status"], reply["error"])
        assert [(5, 5)] * 4 == sizes(bridge)

    def test_a_bug_on_a_rank_is_a_refusal(self, bridge: FakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker that raises into the engine's own call would take the engine with it."""
        monkeypatch.setattr(bridge.workers.desks[1].host, "prepare", lambda spec: 1 / 0)

        assert "rank 1: ZeroDivisionError" in bridge.set({"plugins.mine.size": 7})["error"]
        assert [(5, 5)] * 4 == sizes(bridge)

    @pytest.mark.parametrize(("size", "status"), [(7, 200), (13, 409)])
    def test_a_rehearsal_says_whether_and_changes_nothing(self, bridge: FakeBridge, size: int, status: int) -> None:
        """It is prepared on all ranks, and given back on all, refused or not."""
        reply = bridge.desk.handle({"command": "set", "values": {"plugins.mine.size": size}, "rehearse": True})

        assert status == reply["status"]
        assert [(5, 5)] * 4 == sizes(bridge)
        assert (5, 1) == (bridge.quota.limit, bridge.host.generation)

    def test_what_the_pool_cannot_hold_is_refused_first(self, bridge: FakeBridge) -> None:
        """The adapter's own check comes before anything is prepared."""

        def check(spec: object) -> None:
            raise ControlError("larger than the pool", 409)

        desk = CoreDesk(bridge.host, attrs.evolve(bridge.desk.ports, check=check))
        reply = desk.handle({"command": "set", "values": {"plugins.mine.size": 7}})

        assert (409, "larger than the pool") == (reply["status"], reply["error"])
        assert [(5, 5)] * 4 == sizes(bridge)

    def test_a_good_change_is_the_newest_snapshot(self, tmp_path: Path) -> None:
        """A refused one is not."""
        snapshots = Snapshots(tmp_path)
        bridge = attach(FakeEngine(), {"plugins.mine.size": 5}, Mine, snapshots=snapshots)
        bridge.set({"plugins.mine.size": 7})
        bridge.engine.faults.refusing_ranks = {0}
        bridge.set({"plugins.mine.size": 9})

        newest = snapshots.newest()
        assert newest is not None
        assert 7 == newest["plugins.mine.size"]


def test_a_port_that_is_not_given_does_nothing() -> None:
    """An adapter need not offer what it has no use for."""
    bridge = attach(FakeEngine(), {"plugins.mine.size": 5}, Mine)
    bare = Ports(ranks=bridge.workers.handle, pool=dict, requests=dict)

    assert 200 == CoreDesk(bridge.host, bare).handle({"command": "set", "values": {"plugins.mine.size": 7}})["status"]
