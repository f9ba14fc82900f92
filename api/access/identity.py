"""The tenant, the key and the rights of one request, from its secret alone. No header can set them."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from litestar.types import HTTPScope

from api.access.keyring import Keyring
from api.errors.errors import Unauthorized
from api.settings import ApiSettings
from control.access import ApiKey, hash_secret, key_id_of
from control.errors import ModelNotFound, RequestError
from control.keys import CLASSES
from control.records.responses import KEYLESS


@dataclass(frozen=True, slots=True)
class Identity:
    """`account` is what the usage is counted under, "" for nothing; `key` is one of the farm's, if it was one."""

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

    def check_model(self, asked: str | None, model: str) -> None:
        """Raises ModelNotFound for a model that the key may not use: as for one that is not there."""
        if not self.may_use(asked, model):
            assert self.key is not None
            raise ModelNotFound(asked or model, self.key.models)

    def may_use(self, asked: str | None, model: str) -> bool:
        """True if the key opens a model, by the name that the client used or by its own."""
        return self.key is None or not self.key.models or model in self.key.models or asked in self.key.models

    def priority(self, asked: str | None) -> str:
        """The class of a request: normal, or the key's best if that is lower. Raises RequestError for a better one."""
        cap = CLASSES.index(self.key.priority_cap if self.key is not None else "high")
        wanted = CLASSES.index(asked or "normal")
        if asked is not None and wanted < cap:
            raise RequestError(
                f"'priority' {asked!r} is above this API key's best, {CLASSES[cap]!r}. Lower it, or leave it out.",
                param="priority",
                code="priority_not_allowed",
            )
        return CLASSES[max(cap, wanted)]


ANONYMOUS = Identity()

PROBES = frozenset(("/health", "/ready", "/metrics", "/load", "/ping", "/version"))
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
    """The tenant that a secret stands for that is none of the farm's keys; it never reaches Redis or a log itself."""
    return "anonymous" if not token else hashlib.sha256(token.encode()).hexdigest()[:16]


class Gate:
    """Turns secrets into identities, by the process's settings and the farm's keys."""

    def __init__(self, settings: ApiSettings, keyring: Keyring) -> None:
        self._asks, self._free = settings.asks_for_key, settings.farm_open
        self._fixed = [key.encode() for key in settings.api_keys]
        self._keyring = keyring
        self._tenants = OrderedDict[str, str]()
        """By the hash of a secret that had an account."""

    def turns_of(self, scope: HTTPScope) -> str:
        """The tenant in whose turns a request waits, before anything is known but its head.

        Callers without an account share the turns of their address. Probes and operators have turns of their own.
        """
        client = scope["client"]
        address, path = client[0] if client is not None else "", scope["path"]
        if path in PROBES:
            return f"probes of {address}"
        if path.startswith(_OPERATORS):
            return f"operators of {address}"
        secret = secret_of(scope["headers"])
        tenant = self._tenants.get(hash_secret(secret)) if secret else None
        return f"address {address}" if tenant is None else f"tenant {tenant}"

    async def identify(self, token: str) -> Identity:
        """Raises Unauthorized where a key is asked for and this is none, RedisUnavailable where that can't be told."""
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
                self._keyring.used(key.id)
                return Identity(key.tenant, key.id, key, key.admin or self._free)
            if self._asks:
                raise Unauthorized(f"This API key ({key.id}) has expired or was revoked. Use another one.")
        if self._asks:
            what = "is wrong" if token else "is missing"
            raise Unauthorized(f"The API key {what}. Send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'.")
        return Identity(tenant_of(token), admin=self._free)
