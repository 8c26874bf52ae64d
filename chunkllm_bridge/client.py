"""Talk to a running server's control routes."""

from __future__ import annotations

import os
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
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https", "unix"):
            raise ControlError(f"--url {url!r} is no http://host:port, https://host or unix:/path/to/socket")
        found = given or os.environ.get(token.VARIABLE) or _read(self.url)
        headers = {"Authorization": f"Bearer {found}"} if found else {}
        transport = httpx.HTTPTransport(uds=parts.path) if parts.scheme == "unix" else None
        base = "http://localhost" if parts.scheme == "unix" else self.url
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport, trust_env=False)
        self._has_token = bool(found)

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def set(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", "set", {"set": dict(values)})

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, f"/chunkllm/{path}", json=body)
        except httpx.HTTPError as error:
            raise ControlError(f"no server answers at {self.url}: {error}", 503) from None
        if response.status_code == 404 and not _is_ours(response):
            raise ControlError(f"{self.url} has no control routes: start the server with --plugin chunkllm", 404)
        if response.status_code == 401:
            where = token.path_for_url(self.url)
            hint = "the token is not this server's" if self._has_token else f"no token given, and none at {where}"
            raise ControlError(f"{self.url}: {hint}; give --token, {token.VARIABLE} or the server's --api-key", 401)
        try:
            data: dict[str, Any] = response.json()
        except ValueError:
            raise ControlError(f"{self.url} answered {response.status_code} without JSON", 502) from None
        if response.is_error:
            raise ControlError(str(data.get("error") or data), response.status_code)
        return data


def _read(url: str) -> str | None:
    try:
        return token.path_for_url(url).read_text().strip() or None
    except (OSError, ValueError):
        return None


def _is_ours(response: httpx.Response) -> bool:
    try:
        return "error" in response.json()
    except ValueError:
        return False
