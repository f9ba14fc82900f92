"""Redis URLs: one server, a primary that Sentinels know, or a Cluster; their names, without a password."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from control.errors import SettingsError


def redacted(url: str) -> str:
    """`url` with its password, if any, replaced by ***.

    >>> redacted("redis://:secret@host:6379/0")
    'redis://:***@host:6379/0'
    """
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, place = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{place}"))


def password_in(url: str) -> str | None:
    """The password as it stands in `url`, escapes and all; None where there is none.

    >>> password_in("redis://:se%20cret@host:6379/0")
    'se%20cret'
    """
    user, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    password = user.partition(":")[2] if at else ""
    return password or None


def address(client: Any) -> str:
    """The server of a sync or asyncio client, as a URL without credentials."""
    pool = client.connection_pool
    kwargs: dict[str, Any] = pool.connection_kwargs
    database = kwargs.get("db") or 0
    if kwargs.get("path"):
        return f"unix://{kwargs['path']}?db={database}"
    secure = "rediss" if "SSL" in pool.connection_class.__name__ else "redis"
    if shards := getattr(client, "shards", None):
        return f"{secure}+cluster://{_joined(shards.sources)}"
    if manager := getattr(pool, "sentinel_manager", None):
        options = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
        places = _joined((one["host"], one["port"]) for one in options)
        return f"{secure}+sentinel://{places}/{pool.service_name}/{database}"
    return f"{secure}://{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}/{database}"


def endpoint(client: Any) -> tuple[str, int] | None:
    """Host and port of a server that a sync client talks to; None for a unix socket.

    Raises redis-py's ConnectionError while the Sentinels know no primary.
    """
    pool = client.connection_pool
    if shards := getattr(client, "shards", None):
        return shards.sources[0]
    if hasattr(pool, "sentinel_manager"):
        return pool.get_master_address()
    kwargs: dict[str, Any] = pool.connection_kwargs
    return (kwargs["host"], kwargs.get("port", 6379)) if kwargs.get("host") else None


def _joined(places: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{host}:{port}" for host, port in places)


FORMS = (
    "redis://[:PASSWORD@]HOST:PORT/DB, rediss:// (TLS), unix://PATH, "
    "redis+sentinel://[:PASSWORD@]HOST:PORT,HOST:PORT/NAME[/DB] and redis+cluster://[:PASSWORD@]HOST:PORT,HOST:PORT"
)
SENTINEL_PORT = 26379
SERVER_PORT = 6379

Address = tuple[str, int]
Kind = Literal["server", "sentinel", "cluster"]

_KINDS: dict[str, Kind] = {
    "redis": "server",
    "rediss": "server",
    "unix": "server",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL that can be used. `nodes`, `name`, `secure` and `options` are those of a Sentinel's or a Cluster's."""

    text: str
    kind: Kind
    nodes: tuple[Address, ...] = ()
    """The Sentinels, or the Cluster's nodes that are asked for the others."""
    name: str = ""
    """The primary's name at the Sentinels."""
    secure: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the connection to a data server: user name, password, database, TLS."""


def parse_redis_url(url: str) -> RedisUrl:
    """Raises SettingsError that shows what is wrong and what is accepted, and no password."""
    try:
        parts = urlsplit(url)
        kind = _KINDS.get(parts.scheme)
        if kind == "server":
            _ = parts.port
        nodes = _nodes(parts, SENTINEL_PORT if kind == "sentinel" else SERVER_PORT) if kind != "server" else ()
    except ValueError as error:
        raise SettingsError(f"the Redis URL {_scheme_only(url)} can't be read: {error}") from error
    if kind is None:
        raise SettingsError(
            f"the Redis URL {redacted(url)!r} begins with {parts.scheme or 'nothing'}:// ; accepted are {FORMS}"
        )
    if parts.scheme == "unix" and not (parts.path or parts.netloc):
        raise SettingsError(f"the Redis URL {redacted(url)!r} names no socket; write unix:///path/to/redis.sock")
    if kind == "server":
        return RedisUrl(url, kind)
    name, _, database = parts.path.strip("/").partition("/")
    _check_place(url, kind, nodes, name, database)
    options = _options(parts, database or "0")
    return RedisUrl(url, kind, nodes, unquote(name), parts.scheme.startswith("rediss"), options)


def _check_place(url: str, kind: Kind, nodes: tuple[Address, ...], name: str, database: str) -> None:
    if not nodes:
        raise SettingsError(f"the Redis URL {redacted(url)!r} names no host; accepted are {FORMS}")
    if kind == "sentinel" and (not name or not (database or "0").isdecimal()):
        raise SettingsError(
            f"the Redis URL {redacted(url)!r} must end with the primary's name as the Sentinels know it, and may add "
            "a database: redis+sentinel://HOST:26379,HOST:26379/NAME/0"
        )
    if kind == "cluster" and name not in ("", "0"):
        raise SettingsError(f"the Redis URL {redacted(url)!r} names database {name!r}, but a Cluster has only 0")


def _nodes(parts: SplitResult, port: int) -> tuple[Address, ...]:
    places = parts.netloc.rpartition("@")[2]
    each = [urlsplit(f"//{place}") for place in places.split(",") if place]
    if any(not one.hostname for one in each):
        raise ValueError("a host is missing")
    return tuple((one.hostname or "", one.port or port) for one in each)


def _options(parts: SplitResult, database: str) -> tuple[tuple[str, Any], ...]:
    """User name, password, database and the query's options, read as redis-py reads them for one server."""
    user, at, _ = parts.netloc.rpartition("@")
    scheme = parts.scheme.partition("+")[0]
    from redis.connection import parse_url  # only here: commands that start other processes do without redis

    options: dict[str, Any] = parse_url(urlunsplit((scheme, f"{user}{at}one", f"/{database}", parts.query, "")))
    return tuple((name, value) for name, value in options.items() if name not in ("host", "port", "connection_class"))


def credentials_in(url: str) -> tuple[str, str]:
    """User name and password, unescaped; a URL without any stands for the default user, whose password may be empty.

    >>> credentials_in("redis://:se%20cret@host:6379/0")
    ('default', 'se cret')
    """
    parts = urlsplit(url)
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    query = dict(parse_qsl(parts.query))  # redis-py takes them there too, but those before the host win
    return unquote(user) or query.get("username") or "default", unquote(password) or query.get("password", "")


def without_credentials(url: str) -> str:
    """`url` without user name and password.

    >>> without_credentials("redis+cluster://user:secret@a:1,b:2")
    'redis+cluster://a:1,b:2'
    """
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    host, slash, path = place.partition("/")
    options = urlencode([pair for pair in parse_qsl(query) if pair[0] not in ("username", "password")], safe="/:")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{'?' if options else ''}{options}"


def _scheme_only(url: str) -> str:
    """A malformed URL can hide its password anywhere: only its scheme is safe to show."""
    return f"{url.partition('://')[0]}://…"
