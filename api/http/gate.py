"""Identifies the sender of a request and admits or refuses it: its tenant, key and rights, operators, and pages
of other origins.

Tenant, key and rights follow from the secret alone. No header can set them.

A web page must not use its visitor's browser to reach a farm that asks for no key. A browser names the page's origin in
`Origin`. A page whose own host name was pointed at this machine (DNS rebinding) has that name in `Host`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import structlog
from litestar.connection import ASGIConnection
from litestar.datastructures import Headers
from litestar.handlers import BaseRouteHandler
from litestar.types import HTTPScope

from api.http.errors import Forbidden, Unauthorized
from api.http.tasks import PeriodicTask
from control import access
from control.access import ApiKey, hash_secret, key_id_of
from control.errors import ModelNotFound, RedisUnavailable, RequestError
from control.keys import CLASSES
from control.listening import is_loopback
from control.records.responses import KEYLESS
from control.redis.connection import Batches

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """The sender of a request. Its usage is counted under `account`, "" for none; `key` is the farm's key that it sent,
    None for any other secret."""

    tenant: str = "anonymous"
    account: str = ""
    key: ApiKey | None = None
    admin: bool = False

    @property
    def owner(self) -> str:
        """Whose quota its stored responses take: its tenant's, or that of all callers without a key."""
        return self.tenant if self.account else KEYLESS

    @property
    def limited(self) -> bool:
        """True if the request counts against limits."""
        return self.key is not None and self.key.limited

    def check_model(self, name: str | None, model: str) -> None:
        """Raises ModelNotFound for a model that the key may not use: as for one that is not there."""
        if not self.may_use(name, model):
            assert self.key is not None
            raise ModelNotFound(name or model, self.key.models)

    def may_use(self, name: str | None, model: str) -> bool:
        """True if the key opens a model, by the name that the client used or by its own."""
        return self.key is None or not self.key.models or model in self.key.models or name in self.key.models

    def priority(self, requested: str | None) -> str:
        """The class of a request: normal, or the key's best if that is lower. Raises RequestError for a better one."""
        cap = CLASSES.index(self.key.priority_cap if self.key is not None else "high")
        rank = CLASSES.index(requested or "normal")
        if requested is not None and rank < cap:
            raise RequestError(
                f"'priority' {requested!r} is above this API key's best, {CLASSES[cap]!r}. Lower it, or leave it out.",
                param="priority",
                code="priority_not_allowed",
            )
        return CLASSES[max(cap, rank)]


ANONYMOUS = Identity()

PROBES = frozenset(("/", "/api/version", "/health", "/ready", "/metrics", "/load", "/ping", "/version"))
"""Paths that load balancers and monitors ask for."""
_OPERATORS = ("/farm", "/console")
"""First parts of the paths that operators use."""
_MOST_TENANTS = 10_000
"""Secrets whose tenants are remembered; the one that was not used for the longest goes first."""


def secret_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The secret that a request brings: its bearer token, else x-api-key; "" for none. The names are in lower case."""
    bearer = key = ""
    for name, value in headers:
        if name == b"authorization" and not bearer:
            scheme, _, token = value.decode("latin-1").partition(" ")
            bearer = token.strip() if scheme.lower() == "bearer" else ""
        elif name == b"x-api-key" and not key:
            key = value.decode("latin-1").strip()
    return bearer or key


def tenant_of(token: str) -> str:
    """The tenant of a secret that is none of the farm's keys. The secret itself never reaches Redis or a log."""
    return "anonymous" if not token else hashlib.sha256(token.encode()).hexdigest()[:16]


class Gate:
    """Turns secrets into identities, by the keys of this process and of the farm."""

    def __init__(self, keyring: Keyring, *, asks_for_key: bool, farm_open: bool, fixed_keys: Sequence[str]) -> None:
        """`farm_open`: the operator's routes need no key. `fixed_keys` open this process, beside the farm's keys."""
        self._asks = asks_for_key
        self._free = farm_open
        self._fixed = [key.encode() for key in fixed_keys]
        self._keyring = keyring
        self._tenants = OrderedDict[str, str]()
        """By the hash of a secret that had an account."""

    def turns_of(self, scope: HTTPScope) -> str:
        """The tenant in whose turns a request waits, before anything is known but its head.

        Callers without an account share the turns of their address. Probes and operators have turns of their own.
        """
        client = scope["client"]
        address = client[0] if client is not None else ""
        path = scope["path"]
        if path in PROBES:
            return f"probes of {address}"
        if path.startswith(_OPERATORS):
            return f"operators of {address}"
        secret = secret_of(scope["headers"])
        tenant = self._tenants.get(hash_secret(secret)) if secret else None
        return f"address {address}" if tenant is None else f"tenant {tenant}"

    async def identify(self, token: str) -> Identity:
        """Raises Unauthorized if a key is required and this is none, RedisUnavailable if that is unknown."""
        identity = await self._identity(token)
        if identity.account:
            self._tenants[hash_secret(token)] = identity.tenant
            self._tenants.move_to_end(hash_secret(token))
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        return identity

    async def _identity(self, token: str) -> Identity:
        if any(secrets.compare_digest(token.encode(), key) for key in self._fixed):
            tenant = tenant_of(token)
            return Identity(tenant, account=tenant)
        key_id = key_id_of(token)
        key = await self._keyring.find(key_id) if key_id is not None else None
        if key is not None and secrets.compare_digest(hash_secret(token), key.sha256):
            if key.state(time.time()) == "active":
                self._keyring.mark_used(key.id)
                return Identity(key.tenant, key.id, key, key.admin or self._free)
            if self._asks:
                raise Unauthorized(f"This API key ({key.id}) has expired or was revoked. Use another one.")
        if self._asks:
            fault = "is wrong" if token else "is missing"
            raise Unauthorized(f"The API key {fault}. Send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'.")
        return Identity(tenant_of(token), admin=self._free)


KEYS_LANE = "api keys"
"""The lane of all calls about keys, which belong to no model; no model's name has a space."""
LOOK_EVERY_S = 1.0
STALE_S = 3.0
"""After so long without a look, the keys in memory are not trusted any more."""
AWAY_S = 600.0
"""Seconds for which a known key works while Redis is away."""
FORGET_S = 60.0
"""Age at which a key is read again, whatever the version is: a change may have been cut off before it was counted."""
MOST_KEYS = 10_000
"""Ids kept in memory, unknown ones included; the one that was used least recently is dropped first."""
NOTE_USED_S = 60.0


@dataclass(slots=True)
class _CachedKey:
    key: ApiKey | None
    at: float
    """Monotonic time at which it was read."""


class Keyring:
    """The farm's API keys in memory, so that a request needs no read of its own.

    Without `start` every look-up asks Redis. Once a second the version of the keys is read. If it has changed, the
    keys in memory are read again; if it is lower, Redis has lost changes. While Redis is away, the keys in memory work
    for a while and all others are refused.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._cached: OrderedDict[str, _CachedKey] = OrderedDict()
        self._version = -1
        self._looked_at = float("-inf")
        self._away: RedisUnavailable | None = None
        self._used_ids: set[str] = set()
        self._noted: dict[str, float] = {}
        self._task = PeriodicTask("read_keys", self._keep_looking, LOOK_EVERY_S)
        self.start = self._task.start
        self.stop = self._task.stop

    async def find(self, key_id: str) -> ApiKey | None:
        """The key of an id, whatever its state. Raises RedisUnavailable where only Redis could tell."""
        entry = self._cached.get(key_id)
        now = time.monotonic()
        fresh = now - self._looked_at < STALE_S
        if entry is not None and fresh and now - entry.at < FORGET_S:
            self._cached.move_to_end(key_id)
            return entry.key
        if self._away is not None:
            return self._while_away(entry, now, self._away)
        try:
            return await self._read_key(key_id)
        except RedisUnavailable as error:
            return self._while_away(entry, now, error)

    def mark_used(self, key_id: str) -> None:
        """A request came with this key; when that was is written down now and then."""
        self._used_ids.add(key_id)

    async def look(self) -> None:
        """Learn what has changed. Raises RedisUnavailable."""
        version = await self._batches.run(KEYS_LANE, access.version())
        if version < self._version:
            await self._bring_back()
            version = await self._batches.run(KEYS_LANE, access.version())
        if version != self._version:
            # Reads from here on include all changes up to this number; the next look finds later ones.
            self._version = version
            await self._read_again(list(self._cached))
        await self._read_again(self._growing_old())
        self._looked_at = time.monotonic()
        self._away = None
        await self._note_used()

    async def _read_key(self, key_id: str) -> ApiKey | None:
        while True:
            version = self._version
            key = await self._batches.run(KEYS_LANE, access.get(key_id))
            if version == self._version:
                # Else a change was found meanwhile, perhaps of this very key.
                self._keep({key_id: key}.items())
                return key

    def _growing_old(self) -> list[str]:
        """Keys in use that are read again here, so that no request has to wait for it."""
        now = time.monotonic()
        return [
            key_id
            for key_id in self._used_ids
            if key_id in self._cached and now - self._cached[key_id].at > FORGET_S / 2
        ]

    async def _read_again(self, ids: list[str]) -> None:
        try:
            keys_read = await self._batches.run_every(KEYS_LANE, [access.get(key_id) for key_id in ids])
        except Exception:
            self._version = -1  # the next look reads them again
            raise
        self._keep(zip(ids, keys_read, strict=True))

    def _keep(self, keys_read: Iterable[tuple[str, ApiKey | None]]) -> None:
        now = time.monotonic()
        for key_id, key in keys_read:
            self._cached[key_id] = _CachedKey(key, now)
        while len(self._cached) > MOST_KEYS:
            self._cached.popitem(last=False)

    def _while_away(self, entry: _CachedKey | None, now: float, error: RedisUnavailable) -> ApiKey | None:
        if entry is None or entry.key is None or now - entry.at > AWAY_S + FORGET_S:
            raise error
        return entry.key

    async def _bring_back(self) -> None:
        """Write back the keys in memory that Redis lacks, after it has lost changes or everything."""
        lost = [entry.key for entry in self._cached.values() if entry.key is not None]
        log.warning("Redis has lost API keys; those in memory are written back", action="restore_keys", keys=len(lost))
        for key in lost:
            await self._batches.run_every(KEYS_LANE, access.restore(key))

    async def _note_used(self) -> None:
        now = time.monotonic()
        due = [key_id for key_id in self._used_ids if now - self._noted.get(key_id, float("-inf")) >= NOTE_USED_S]
        self._used_ids.difference_update(due)
        self._noted = {key_id: at for key_id, at in self._noted.items() if now - at < NOTE_USED_S}
        self._noted.update(dict.fromkeys(due, now))
        await self._batches.run_all(KEYS_LANE, [access.note_used(key_id, int(time.time())) for key_id in due])

    async def _keep_looking(self) -> None:
        try:
            await self.look()
        except RedisUnavailable as error:
            self._away = error
            raise


Connection = ASGIConnection[Any, Any, Any, Any]


async def operators_only(connection: Connection, _: BaseRouteHandler) -> None:
    """As `check_operator`, before the handler."""
    await check_operator(connection)


async def check_operator(connection: Connection) -> None:
    """Raises Unauthorized without a key where one is required, and Forbidden for a key without the right."""
    identity = await _operator(connection)
    if connection.scope.get("method") not in ("GET", "HEAD"):
        key = identity.key.id if identity.key is not None else None
        log.info("an operator acts", action="operate", path=connection.url.path, key=key)


async def _operator(connection: Connection) -> Identity:
    identity = await connection.app.state.process.gate.identify(secret_of(connection.scope["headers"]))
    if not identity.admin:
        raise _refusal(identity)
    if identity.key is None or not identity.key.admin:
        _check_local(connection)
    return identity


async def is_still_operator(connection: Connection) -> bool:
    """False once the key of an open stream has ended or lost its right; True while that is unknown."""
    try:
        await _operator(connection)
    except (Unauthorized, Forbidden):
        return False
    except RedisUnavailable:
        return True
    return True


def _refusal(identity: Identity) -> RequestError:
    if not identity.account:
        return Unauthorized("Operators need an API key here: one made with `furrow keys create --admin`.")
    return Forbidden("This API key is no operator's. Use one made with `furrow keys create --admin`.")


def _check_local(connection: Connection) -> None:
    """Refuse a page of another origin in this machine's browser, and what a proxy passes on from another machine."""
    headers = connection.headers
    host = headers.get("host", "")
    origin = headers.get("origin")
    proxy = proxy_header(headers)
    if proxy is not None:
        raise Forbidden(
            f"Without a key the operator's routes refuse what comes through a proxy (header {proxy!r}: "
            f"{headers[proxy][:80]!r}). Call this server directly, or use a key made with "
            "`furrow keys create --admin`."
        )
    elsewhere = origin is not None and not is_same_origin(origin, host)
    if not is_loopback(host_name(host)) or elsewhere or headers.get("sec-fetch-site", "none") == "cross-site":
        raise Forbidden(
            "Without a key the operator's routes answer this machine only, by its loopback name and to no page from "
            f"elsewhere (Host: {host[:255]!r}, Origin: {origin and origin[:255]!r}). Use a key made with "
            "`furrow keys create --admin`."
        )


_PORTS = {"http": 80, "https": 443}
_CONTAINERS = ".internal"
"""Reserved for private use: `host.docker.internal` and its like name this machine from inside a container."""
_PROXY_HEADERS = ("forwarded", "via", "x-real-ip")
_PROXY_PREFIX = "x-forwarded-"


class OriginCheck:
    """Refuses requests of foreign pages. Where keys are required it does nothing: a page does not know one."""

    def __init__(self, *, asks_for_key: bool, cors_origins: Sequence[str], host: str) -> None:
        """`cors_origins`: those whose pages may call; `*`: all. `host` is what the process listens on."""
        self._needed = not asks_for_key and "*" not in cors_origins
        self._loopback = is_loopback(host)
        self._origins = frozenset(origin.lower() for origin in cors_origins)
        self._hosts = frozenset(urlsplit(origin).hostname for origin in self._origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raises Forbidden for a request of a foreign page, and on loopback for a `Host` that is not loopback."""
        if not self._needed:
            return
        host = headers.get("host", "")
        origin = headers.get("origin")
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
        elif origin.lower() not in self._origins and not is_same_origin(origin, host):
            raise _foreign(repr(origin[:255]), origin[:255])


def _foreign(origin: str, option: str) -> Forbidden:
    return Forbidden(
        f"The page's Origin {origin} is not this server's own and may not call it. Start the server with --cors-origin "
        f"{option} (or `*` for every page) to allow it.",
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
