"""The last good specs on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chunkllm_bridge.common.errors import ConfigError
from chunkllm_bridge.common.snapshots import KEEP, Snapshots, state_home
from chunkllm_bridge.common.spec import Spec
from chunkllm_bridge.common.testing import FakeCatalogue, FakeEngine, spec_for


def spec(ratio: float = 0.25, **settings: object) -> Spec:
    return spec_for(FakeEngine(), {"kv_cache.memory_ratio": ratio, **settings}, FakeCatalogue())


def ratio(snapshots: Snapshots) -> float | None:
    newest = snapshots.newest()
    return None if newest is None else newest["kv_cache.memory_ratio"]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """Every value with its source."""
    Snapshots(tmp_path).save(spec())

    assert spec() == Snapshots(tmp_path).newest()


def test_the_newest_wins(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for share in (0.1, 0.3, 0.2):
        snapshots.save(spec(share))

    assert 0.2 == ratio(snapshots)
    assert ["spec-000001.json", "spec-000002.json", "spec-000003.json"] == sorted(os.listdir(tmp_path))


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert Snapshots(tmp_path).newest() is None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "7", '{"schema": 99, "values": {}}', '{"schema": 1, "values": []}', "\udcff"]
)
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    """For the one before; half a file or another version's is no reason to have none."""
    snapshots = Snapshots(tmp_path)
    snapshots.save(spec(0.1))
    (tmp_path / "spec-000002.json").write_bytes(damage.encode(errors="surrogateescape"))

    assert 0.1 == ratio(snapshots)


def test_a_value_of_another_shape_is_damage(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.save(spec(0.1))
    wire = spec(0.2).to_wire()
    wire["values"]["plugin.priority"] = 50
    (tmp_path / "spec-000002.json").write_text(json.dumps(wire))

    assert 0.1 == ratio(snapshots)


def test_one_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """A folder of that name, a file that another process just cleaned."""
    snapshots = Snapshots(tmp_path)
    snapshots.save(spec(0.1))
    (tmp_path / "spec-000002.json").mkdir()

    assert 0.1 == ratio(snapshots)


def test_a_file_that_people_put_there_is_not_ours(tmp_path: Path) -> None:
    """It is neither read, nor counted, nor cleaned."""
    (tmp_path / "spec-000009-mine.json").write_text("{}")
    (tmp_path / "spec-notes.json").write_text("{}")
    snapshots = Snapshots(tmp_path)
    for _ in range(KEEP + 1):
        snapshots.save(spec())

    assert KEEP + 2 == len(os.listdir(tmp_path))
    assert 0.25 == ratio(snapshots)


def test_old_ones_are_cleaned(tmp_path: Path) -> None:
    """The newest sixteen are kept, numbers go on."""
    snapshots = Snapshots(tmp_path)
    for _ in range(KEEP + 3):
        snapshots.save(spec())

    assert [f"spec-{number:06d}.json" for number in range(4, KEEP + 4)] == sorted(os.listdir(tmp_path))


def test_a_full_disk_costs_the_snapshot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on, and the one before is still there, whole."""
    snapshots = Snapshots(tmp_path)
    snapshots.save(spec(0.1))

    def full(self: Path, text: str) -> None:
        with self.open("w") as handle:
            handle.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    snapshots.save(spec(0.2))

    assert 0.1 == ratio(snapshots)
    assert ["spec-000001.json"] == os.listdir(tmp_path)


def test_the_folder_is_the_spec_s(tmp_path: Path) -> None:
    """It is made where it is missing, and the test of it leaves nothing."""
    folder = tmp_path / "a/b"

    assert folder == Snapshots.of(spec(**{"rollback.config": str(folder)})).folder
    assert [] == os.listdir(folder)


def test_without_a_spec_file_it_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    assert tmp_path / "chunkllm/snapshots" == Snapshots.of(spec()).folder
    monkeypatch.delenv("XDG_STATE_HOME")
    assert Path.home() / ".local/state/chunkllm" == state_home()


def test_a_folder_that_cannot_be_written_is_a_mistake_in_the_spec(tmp_path: Path) -> None:
    """Told at start, with the key, the path and where it was said."""
    (tmp_path / "file").write_text("")
    wanted = tmp_path / "file/state"

    with pytest.raises(ConfigError) as caught:
        Snapshots.of(spec(**{"rollback.config": str(wanted)}))

    (problem,) = caught.value.problems
    assert ("rollback.config", str(wanted), "--plugin-set") == (problem.key, problem.value, problem.where)
    assert "cannot be written: Not a directory" == problem.reason
