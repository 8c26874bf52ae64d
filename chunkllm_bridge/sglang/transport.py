"""What travels inside SGLang: the passport on its arguments, and our messages in its own form (`io_struct.py`).

Loaded only in processes of an engine. Messages are pickled by reference; with msgpack IPC SGLang has to know them.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import io_struct

from chunkllm_bridge.common.passport import Passport

ATTRIBUTE = "_chunkllm"
"""Our attribute of `ServerArgs`: an underscore makes it bookkeeping, which stays writable and survives pickling."""


def passport_of(server_args: Any) -> Passport | None:
    """The passport on a `ServerArgs`, or None where the bridge is off."""
    wire = getattr(server_args, ATTRIBUTE, None)
    return Passport.from_wire(wire) if wire is not None and Passport.is_wire(wire) else None


class Command(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]  # an engine is Any to us
    """One command, to every replica. `rid` says to which question the answers belong."""

    message: dict[str, Any]

    def answer(self, reply: dict[str, Any]) -> Answer:
        """The reply of this scheduler's replica."""
        from sglang.srt.runtime_context import get_parallel

        return Answer(rid=self.rid, reply=reply, rank=get_parallel().dp_rank or 0)


class Answer(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """What one replica said; only the first rank of its group speaks."""

    reply: dict[str, Any]
    rank: int = 0  # of the replica: its data-parallel rank


class Decision(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """What the first rank decided for a step, on its way to the others in the order of requests."""

    limit: int | None  # blocks that requests may hold; None: no limit
    hold_new: bool  # whether new prefills wait
    release: list[str] = []  # noqa: RUF012 (msgspec gives each a new one); requests of the ones held that may go all the same


io_struct.hook_custom_types(Command, Answer, Decision)
