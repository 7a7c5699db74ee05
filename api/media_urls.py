"""Media that a message gives by address: fetched from hosts that the settings allow, and from no other.

Owns the policy (`--allowed-media-domains`) and its bounds: public addresses alone, looked at again after each redirect, and
connected to as they were looked at, so that a name cannot mean another machine a moment later. Knows nothing of what the
files hold. Called by `api/conversation`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from engine.errors import InvalidRequest, MediaError

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 3
FETCH_SECONDS = 20.0
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public_address(address: str) -> bool:
    """Whether an IP address is one of the public internet: not private, loopback, link-local, multicast or reserved."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public_address(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class MediaUrls:
    """Fetches files from allowed hosts.

    Args:
        allowed: host names; `*` is any.
        is_public: whether a server at this IP address may be asked.
        max_seconds: for one file, redirects included.
    """

    def __init__(
        self,
        allowed: Collection[str],
        *,
        is_public: Callable[[str], bool] = is_public_address,
        max_seconds: float = FETCH_SECONDS,
    ) -> None:
        self._allowed = {_plain(host) for host in allowed}
        self._is_public = is_public
        self._max_seconds = max_seconds

    def check(self, url: str, param: str) -> None:
        """Raise `InvalidRequest` unless an address is one that may be fetched, as far as its text tells."""
        self._parse(url, param)

    async def fetch(self, url: str, param: str, *, max_bytes: int) -> bytes:
        """The file at an address that `check` lets pass.

        Raises:
            InvalidRequest: it leads to a host that is not allowed.
            MediaError: it cannot be had, is larger than `max_bytes`, or takes too long.
        """
        import httpx

        try:
            # Settings of the environment are left aside: a proxy would connect to what it likes.
            async with httpx.AsyncClient(trust_env=False, timeout=self._max_seconds) as client:
                return await asyncio.wait_for(self._follow(client, url, param, max_bytes), self._max_seconds)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            reason = f"took longer than {self._max_seconds:g} seconds"
        except (httpx.HTTPError, ValueError):
            reason = "could not be fetched"
        raise MediaError(f"The file at {param} {reason}; send it as a data: URL.", param=param) from None

    async def _follow(self, client: httpx.AsyncClient, url: str, param: str, max_bytes: int) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            request = await self._request(client, url, param)
            answer = await client.send(request, stream=True)
            try:
                if not answer.has_redirect_location:
                    return await _read(answer, param, max_bytes)
                url = urljoin(url, answer.headers["location"])
            finally:
                await answer.aclose()
        raise MediaError(f"{param} is redirected more than {MAX_REDIRECTS} times; send a data: URL.", param=param)

    async def _request(self, client: httpx.AsyncClient, url: str, param: str) -> httpx.Request:
        """A request to the very IP address that was looked at, under the name that the address gives."""
        parsed = self._parse(url, param)
        host, port = parsed.raw_host.decode(), parsed.port or (443 if parsed.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            found = []
        addresses = [str(each[4][0]) for each in found]
        if not addresses or not all(map(self._is_public, addresses)):
            raise MediaError(f"{param} leads to {host!r}, which has no public address; send a data: URL.", param=param)
        headers = {"Host": parsed.netloc.decode(), "Accept-Encoding": "identity"}
        return client.build_request(
            "GET", parsed.copy_with(host=addresses[0]), headers=headers, extensions={"sni_hostname": host}
        )

    def _parse(self, url: str, param: str) -> httpx.URL:
        import httpx

        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            raise InvalidRequest(f"{param} is not a valid address; send a data: URL.", param=param) from None
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise InvalidRequest(
                f"{param} must be a data: URL, or an http or https address without a user name.", param=param
            )
        if not self._allowed & {_plain(parsed.host), "*"}:
            what = "this server fetches nothing" if not self._allowed else "this server does not fetch from there"
            raise InvalidRequest(
                f"{param} is an address of {parsed.host[:100]!r}; {what}, send the file as a data: URL, or start the "
                "server with that host in --allowed-media-domains.",
                param=param,
            )
        return parsed


def _plain(host: str) -> str:
    return host.lower().rstrip(".")


async def _read(answer: httpx.Response, param: str, max_bytes: int) -> bytes:
    if answer.status_code != 200:
        raise MediaError(f"The server of {param} answered {answer.status_code}; send a data: URL.", param=param)
    content = bytearray()
    async for piece in answer.aiter_raw():
        content += piece
        if len(content) > max_bytes:
            raise MediaError(f"The file at {param} is larger than {max_bytes / 2**20:.3g} MiB.", param=param)
    return bytes(content)
