"""The hosts that an operator lets images come from: which URLs name one, and which addresses may be connected to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from control.errors import FurrowError

_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*")
_ENTRY = re.compile(r"(?P<host>[^:/@]+)(:(?P<port>[1-9][0-9]{0,4}))?")
_URL = re.compile(r"(?P<scheme>[A-Za-z]+)://(?P<authority>[^/?#\\]*)(?P<target>[!-~]*)", re.ASCII)
_LONGEST_URL = 8192

_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_6TO4 = ipaddress.IPv6Network("2002::/16")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V4 = [
    ipaddress.IPv4Network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4"),
        "224.0.0.0/4",  # multicast
        "168.63.129.16/32",  # Azure's own services answer there
    )
]
"""IANA's registry of special-purpose IPv4 addresses, and the blocks with a comment. The blocks that the registry calls
globally reachable are included: they lead to the nearest name server or relay, which may be one of this network."""
_SPECIAL_V6 = [
    ipaddress.IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20")
]
"""The blocks of IANA's registry of special-purpose IPv6 addresses that lie in the global unicast space, but 2002::/16,
which leads to an IPv4 address."""


class UrlRefused(FurrowError):
    """A URL that no image is fetched from; the text follows the image's name in a sentence."""


@dataclass(frozen=True, slots=True)
class CheckedUrl:
    """A URL that was checked. `target` is its path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """As the field Host has it."""
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


class AllowedHosts:
    """Names of hosts, exact, with the ports that each may be asked on."""

    def __init__(self, entries: Iterable[str]) -> None:
        """`entries`: HOST for ports 80 and 443, or HOST:PORT. Raises ValueError for another form."""
        self._ports: dict[str, set[int]] = {}
        for entry in entries:
            match = _ENTRY.fullmatch(entry.strip().lower())
            if match is None or not _HOST.fullmatch(match["host"]) or int(match["port"] or 1) > 65535:
                raise ValueError(f"{entry!r} is no host; write HOST or HOST:PORT, without a scheme or a path")
            ports = {int(match["port"])} if match["port"] else set(_PORTS.values())
            self._ports.setdefault(match["host"], set()).update(ports)

    @property
    def number(self) -> int:
        """Number of names."""
        return len(self._ports)

    def checked(self, url: str) -> CheckedUrl:
        """The parts of a URL of one of the hosts. Raises UrlRefused."""
        match = _URL.fullmatch(url[: _LONGEST_URL + 1].partition("#")[0])
        if match is None or len(url) > _LONGEST_URL or match["scheme"].lower() not in _PORTS:
            raise UrlRefused("has no URL that is served; send data:image/png;base64,… or https://HOST/PATH")
        scheme = match["scheme"].lower()
        authority = match["authority"].lower()
        if "@" in authority:
            raise UrlRefused("has a URL with a user or a password; send it without")
        host, _, port = authority.partition(":")
        if host not in self._ports:
            raise UrlRefused(
                f"is on the host '{host[:80]}', which is none of --image-hosts; send data:image/png;base64,…"
            )
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0 if port else _PORTS[scheme]
        if number not in self._ports[host]:
            allowed = ", ".join(map(str, sorted(self._ports[host])))
            raise UrlRefused(f"is on port {port[:8]} of '{host[:80]}', where --image-hosts allows {allowed}")
        target = match["target"]
        return CheckedUrl(scheme, host, number, target if target.startswith("/") else f"/{target}")


def is_public(address: str) -> bool:
    """True for an address of the public internet. Of an address that leads to an IPv4 one, that one counts.

    The registries are those of IANA, as above: what `ipaddress` takes for global depends on Python's version.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = _inner(ip)
        if inner is None:
            return ip in _GLOBAL_UNICAST and not any(ip in network for network in _SPECIAL_V6)
        ip = inner
    return not any(ip in network for network in _SPECIAL_V4)


def _inner(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a mapped, translated or 6to4 address leads to."""
    if ip in _MAPPED or ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip in _6TO4:
        return ipaddress.IPv4Address(int(ip) >> 80 & 0xFFFFFFFF)
    return None
