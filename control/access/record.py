"""An API key as the farm keeps it, and the secret that its owner has.

A secret reads `fk-<id>-<43 characters>`: the id finds the record, the rest are 256 random bits. So many can't be
guessed, however fast a hash is, so one SHA-256 is all that the farm needs to keep of them; the slow hashes that
passwords need would buy nothing and cost every request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time

import msgspec

from control.bounds import refusal
from control.errors import SettingsError
from control.keys import CLASSES, TENANT_NAME

_SECRET = re.compile(r"fk-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_NUMBERS = ("rpm", "tpm", "max_concurrent", "expires")
LONGEST_NAME = 200


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """Kept as the fields of a hash. Times are Unix seconds, 0 for never; a limit of 0 is none."""

    id: str
    name: str
    tenant: str
    """The tenant under which its requests are scheduled and visible. Keys may share one; by default each has one."""
    sha256: str
    created: int
    admin: bool = False
    """True if it opens the operator's routes."""
    expires: int = 0
    revoked: int = 0
    rpm: int = 0
    """Requests per minute."""
    tpm: int = 0
    """Tokens per minute, prompts and answers together."""
    max_concurrent: int = 0
    """Requests that may wait or run at one time."""
    priority_cap: str = "high"
    """The best class that its requests may have."""
    models: list[str] = []
    """The models that it may use; empty: all."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if (text := refusal(name, getattr(self, name))) is not None:
                raise SettingsError(f"{text} 0 means none.")
        if self.priority_cap not in CLASSES:
            raise SettingsError(f"priority cap {self.priority_cap!r} is unknown: use one of {', '.join(CLASSES)}")
        if not TENANT_NAME.fullmatch(self.tenant):
            raise SettingsError(
                f"tenant {self.tenant!r} can't be used: 1 to 64 letters, digits, '.', '_' and '-', no others"
            )
        if len(self.name) > LONGEST_NAME or not self.name.isprintable():
            raise SettingsError(f"a key's name has at most {LONGEST_NAME} printable characters")

    @property
    def limited(self) -> bool:
        """True if its requests are counted before they are admitted."""
        return bool(self.rpm or self.tpm or self.max_concurrent)

    def state(self, now: float) -> str:
        """`active`, `expired` or `revoked`, at a moment in Unix seconds."""
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and now >= self.expires else "active"


def mint(
    *,
    name: str = "",
    tenant: str = "",
    admin: bool = False,
    expires: int = 0,
    rpm: int = 0,
    tpm: int = 0,
    max_concurrent: int = 0,
    priority_cap: str = "high",
    models: list[str] | None = None,
) -> tuple[ApiKey, str]:
    """A new key and its secret, which is nowhere but in the answer. Raises SettingsError for a value that can't be."""
    key_id = secrets.token_hex(6)
    secret = f"fk-{key_id}-{secrets.token_urlsafe(32)}"
    now = int(time.time())
    if expires and expires <= now:
        raise SettingsError(f"the key would expire at {expires} (Unix seconds), which has passed")
    key = ApiKey(
        id=key_id,
        name=name or key_id,
        tenant=tenant or key_id,
        sha256=hash_secret(secret),
        created=now,
        admin=admin,
        expires=expires,
        rpm=rpm,
        tpm=tpm,
        max_concurrent=max_concurrent,
        priority_cap=priority_cap,
        models=sorted(set(models or [])),
    )
    return key, secret


def hash_secret(secret: str) -> str:
    """The hash that the farm stores of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def key_id_of(secret: str) -> str | None:
    """The id in a secret; None for a text that no key of this farm can be."""
    match = _SECRET.fullmatch(secret)
    return match[1] if match else None
