"""The secret that guards control: made for one launch, in a file that only its owner can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from chunkllm_bridge.common.snapshots import state_home

VARIABLE = "CHUNKLLM_TOKEN"
"""Environment variable: the token. A server makes one for its children where there is none; `chunkllm` reads it."""


def ensure(environ: MutableMapping[str, str]) -> str:
    """The token of this launch. Children inherit it through the environment, which only the same user can read."""
    environ[VARIABLE] = environ.get(VARIABLE) or secrets.token_urlsafe(32)  # an empty one would let anybody in
    return environ[VARIABLE]


def path_for(address: str) -> Path:
    """Where the token of a server lies: by port for "host:port", by name for a socket path. Raises OSError."""
    host, _, name = address.rpartition(":")
    if "/" in host or not name.isdecimal():
        name = hashlib.sha256(os.path.abspath(address).encode()).hexdigest()[:12]
    return state_home() / f"control-{name}.token"


def path_for_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return path_for(parts.path)
    return path_for(f":{parts.port or (443 if parts.scheme == 'https' else 80)}")


def write(address: str, token: str) -> Path:
    """Put the token where the command line finds it: folder 0700, file 0600, replaced whole."""
    path = path_for(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)  # also where somebody else made it first
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(token)
    partial.replace(path)
    return path


def admits(header: str | None, tokens: Sequence[str]) -> bool:
    """Whether an Authorization header carries one of the tokens. Takes the same time whichever it is."""
    scheme, _, given = (header or "").partition(" ")
    matches = [hmac.compare_digest(given.encode(), token.encode()) for token in tokens if token]
    return scheme.lower() == "bearer" and any(matches)
