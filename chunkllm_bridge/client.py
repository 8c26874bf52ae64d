"""Talk to a running server's control routes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from chunkllm_bridge.common import token
from chunkllm_bridge.common.errors import ControlError


class Client:
    """One server. The token is the one given, or the environment's, or the file that a local server wrote."""

    def __init__(self, url: str, given: str | None = None, timeout: float = 60.0) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            place = parts.path if parts.scheme == "unix" else parts.hostname
            fits = parts.scheme in ("http", "https", "unix") and place and parts.port != 0
        except ValueError:  # a port that is none, a bracket without its fellow
            fits = False
        if not fits:
            raise ControlError(f"--url {url!r} is no http://host:port, https://host or unix:/path/to/socket")
        found = given or os.environ.get(token.VARIABLE) or _read(self.url)
        headers = {b"Authorization": f"Bearer {found}".encode()} if found else {}
        # a connection each time: a server hangs up on one that was idle for 5 s, and may do so while we ask again on it
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.HTTPTransport(
            uds=parts.path if parts.scheme == "unix" else None, limits=limits, trust_env=False
        )
        base = "http://localhost" if parts.scheme == "unix" else self.url
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport, trust_env=False)
        self._has_token = bool(found)

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def set(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", "set", {"set": dict(values)})

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            content = None if body is None else json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ControlError(f"such a value cannot be sent: {error}") from None
        try:
            response = self._http.request(method, f"/chunkllm/{path}", content=content)
        except httpx.HTTPError as error:
            raise ControlError(f"no server answers at {self.url}: {error}", 503) from None
        if response.status_code == 404 and not _is_ours(response):
            raise ControlError(f"{self.url} has no control routes: start the server with --plugin chunkllm", 404)
        if response.status_code == 401:
            hint = "the token is not this server's" if self._has_token else "no token given, and none found here"
            raise ControlError(f"{self.url}: {hint}; give --token, {token.VARIABLE} or the server's --api-key", 401)
        try:
            data = response.json()
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise ControlError(f"{self.url} answered {response.status_code} and nothing of ours", 502)
        if response.is_error:
            said = data.get("error") or data
            text = str(said.get("message", said) if isinstance(said, dict) else said)
            raise ControlError(text, response.status_code, data.get("problems") or ())
        return data


def _read(url: str) -> str | None:
    """The token of a server on this machine; another machine's server is not told ours."""
    try:
        return token.path_for_url(url).read_text().strip() or None if _is_here(url) else None
    except (OSError, ValueError):
        return None


def _is_here(url: str) -> bool:
    """Whether this machine answers at that address: a socket can only be bound to an address of its own."""
    host = urlsplit(url).hostname
    if host is None:  # unix:
        return True
    for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family) as probe:
            try:
                probe.bind(address)
            except OSError:
                return False
    return True


def _is_ours(response: httpx.Response) -> bool:
    """Ours says what is wrong in words; vLLM's own "not found" is an object."""
    try:
        data = response.json()
    except ValueError:
        return False
    return isinstance(data, dict) and isinstance(data.get("error"), str)
