"""Protection against web pages: a page must not use its visitor's browser to reach a farm that asks for no key.

A browser names the page's origin in `Origin`. A page whose own host name was pointed at this machine (DNS rebinding)
has that name in `Host`.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from litestar.datastructures import Headers

from api.errors.errors import Forbidden
from api.settings import ApiSettings
from control.listening import is_loopback

_PORTS = {"http": 80, "https": 443}
_CONTAINERS = ".internal"
"""Reserved for private use: `host.docker.internal` and its like name this machine from inside a container."""
_PROXY_HEADERS = ("forwarded", "via", "x-real-ip")
_PROXY_PREFIX = "x-forwarded-"


class OriginCheck:
    """Refuses requests of foreign pages. With keys asked for it has nothing to do: a page does not know one."""

    def __init__(self, settings: ApiSettings) -> None:
        self._needed = not settings.asks_for_key and "*" not in settings.cors_origins
        self._loopback = is_loopback(settings.host)
        self._named = frozenset(origin.lower() for origin in settings.cors_origins)
        self._hosts = frozenset(urlsplit(origin).hostname for origin in self._named)

    def check(self, method: str, headers: Headers) -> None:
        """Raises Forbidden for a request of a foreign page, and on loopback for a `Host` that is not loopback."""
        if not self._needed:
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and host and not (is_local_name(host) or host_name(host) in self._hosts):
            raise Forbidden(
                f"This server listens on loopback and asks for no key, so it refuses the Host {host[:255]!r}, which is "
                f"not a loopback name. Use http://localhost:PORT, start the server with --cors-origin "
                f"http://{host[:255]}, or with --keys.",
                param="host",
                code="foreign_host",
            )
        if origin is None:
            if method not in ("GET", "HEAD") and headers.get("sec-fetch-site") == "cross-site":
                raise _foreign("(not given; Sec-Fetch-Site: cross-site)", "ORIGIN")
        elif origin.lower() not in self._named and not is_same_origin(origin, host):
            raise _foreign(repr(origin[:255]), origin[:255])


def _foreign(shown: str, named: str) -> Forbidden:
    return Forbidden(
        f"The page's Origin {shown} is not this server's own and may not call it. Start the server with --cors-origin "
        f"{named} (or `*` for every page) to allow it.",
        param="origin",
        code="foreign_origin",
    )


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without its port; "" for one that can't be read."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=16)
def is_local_name(host: str) -> bool:
    """True if the name in a `Host` header can only mean this machine, whatever a name server says."""
    name = host_name(host).rstrip(".")
    return is_loopback(name) or name.endswith((".localhost", _CONTAINERS))


def is_same_origin(origin: str, host: str) -> bool:
    """True if a page of `origin` was loaded from `host`. The scheme is not compared: a proxy may have ended TLS."""
    try:
        url = urlsplit(origin)
        own = urlsplit(f"{url.scheme}://{host}")
        default = _PORTS.get(url.scheme)
        if default is None or not url.hostname:
            return False
        return (url.hostname, url.port or default) == (own.hostname, own.port or default)
    except ValueError:
        return False


def proxy_header(headers: Headers) -> str | None:
    """The name of a header that only a proxy adds; None where the request came directly."""
    return next((name for name in headers if name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIX)), None)
