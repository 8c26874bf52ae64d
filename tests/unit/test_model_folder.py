"""scripts/model.py: a model folder is used only as it was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.model import MANIFEST, damage, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    write_manifest(tmp_path)
    return tmp_path


def test_untouched(folder: Path):
    """A folder as it was written is fine, at a look and by hash."""
    assert [] == damage(folder)
    assert [] == damage(folder, verify=True)


def test_touched_but_equal(folder: Path):
    """A file that was copied or touched is hashed, and is fine if its content is."""
    os.utime(folder / "config.json")

    assert [] == damage(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text('{"a": 12}'), "config.json has 9 bytes, not 8"),
        (lambda folder: (folder / "config.json").write_text('{"a": 2}'), "config.json does not have the sha256"),
        (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("{"), f"{MANIFEST} cannot be read"),
    ],
)
def test_damage_is_named(folder: Path, spoil, said: str):
    """Each kind of damage is found and said in words."""
    spoil(folder)

    (found,) = damage(folder)
    assert said in found


def test_damage_that_hides_its_time(folder: Path):
    """A changed file with the old size and time escapes a look, not `--verify`."""
    file = folder / "model.safetensors"
    stat = file.stat()
    file.write_bytes(bytes(999) + b"x")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert [] == damage(folder)
    assert ["model.safetensors does not have the sha256 it was written with"] == damage(folder, verify=True)
