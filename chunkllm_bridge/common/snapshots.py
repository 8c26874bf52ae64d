"""The last good specs on disk: what a rollback returns to."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from pathlib import Path

from chunkllm_bridge.common.errors import ConfigError, Problem
from chunkllm_bridge.common.log import get_logger
from chunkllm_bridge.common.spec import Spec

log = get_logger("snapshots")

KEEP = 16


def state_home() -> Path:
    """The user's own state folder, where no spec file says otherwise: $XDG_STATE_HOME/chunkllm.

    Raises OSError for a user without a home, as a container's made-up one can be.
    """
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "chunkllm"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, f"{error} Set XDG_STATE_HOME") from None


class Snapshots:
    """Numbered files `spec-000001.json` in one folder; the newest is the last good one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, spec: Spec) -> Snapshots:
        """The folder that `rollback.config` names. Raises `ConfigError` when it cannot be written."""
        given = spec["rollback.config"]
        try:
            folder = Path(given) if given is not None else state_home() / "snapshots"
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            source = str(spec.value("rollback.config").source)
            reason = f"cannot be written: {error.strerror}"
            raise ConfigError(
                [Problem(key="rollback.config", value=given and str(given), reason=reason, where=source)]
            ) from None
        return cls(folder)

    def save(self, spec: Spec) -> None:
        """Write the spec as the newest snapshot, whole or not at all. A full disk costs only the snapshot."""
        files = self._files()
        number = int(files[-1].stem.removeprefix("spec-")) + 1 if files else 1
        target = self.folder / f"spec-{number:06d}.json"
        partial = target.with_suffix(f".{os.getpid()}.part")
        try:
            partial.write_text(json.dumps(spec.to_wire(), indent=1))
            partial.replace(target)
            for old in files[: max(0, len(files) + 1 - KEEP)]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("snapshot.failed", path=str(target), reason=str(error))
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def newest(self) -> Spec | None:
        """The last good spec; a damaged file is passed over for the one before, with a warning."""
        for path in reversed(self._files()):
            try:
                return Spec.from_wire(json.loads(path.read_text()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("snapshot.damaged", path=str(path), reason=str(error))
        return None

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("spec-*.json") if path.stem.removeprefix("spec-").isdecimal())
