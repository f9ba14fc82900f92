"""Sealing of texts that a client keeps and gives back: reasoning, and summaries of conversations.

The key is one for the farm. It is random, lies in Redis, and is made by the first API process that needs one: any
process opens what another one sealed. Where it is lost, older texts can't be opened any more. A seal is bound to the
tenant and to the type of the item. It is deterministic (AES-SIV), so a resumed stream has the same one.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable
from functools import partial

from api.schemas.items import Unseal
from control import keys
from control.errors import RedisUnavailable
from control.redis.connection import Batches, optional_text, read

Seal = Callable[[str, str], str]
"""From an item's type and a text to what only this farm can open, for the same tenant; the same each time."""
_LANE = "seal"
_VERSION = "f1."
"""Begins each seal; another way of sealing gets another one."""
_KEY_BYTES = 64
MAX_SEALED = 8 * 1024 * 1024
"""Characters of a seal that are looked at; far more than the reasoning of a whole context."""


class Seals:
    """Seals and opens texts for one tenant at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def sealer(self, tenant: str) -> Seal:
        """Raises RedisUnavailable."""
        return partial(_sealed, await self._key(), tenant)

    async def opener(self, tenant: str) -> Unseal:
        """Raises RedisUnavailable."""
        return partial(_opened, await self._key(), tenant)

    async def _key(self) -> bytes:
        """The farm's key, which is read each time: a process must not go on with one that Redis has lost."""
        get = read("GET", keys.SEAL, parse=optional_text)
        key = await self._batches.run(_LANE, get)
        if key is None:
            make = read("SET", keys.SEAL, secrets.token_hex(_KEY_BYTES), "NX", parse=bool)
            _, key = await self._batches.run_every(_LANE, [make, get])
        if key is None:
            raise RedisUnavailable("the key of sealed texts can't be read")
        return bytes.fromhex(key)


def _sealed(key: bytes, tenant: str, kind: str, text: str) -> str:
    sealed = _cipher(key).encrypt(text.encode(errors="replace"), [tenant.encode(), kind.encode()]) if text else b""
    return _VERSION + base64.urlsafe_b64encode(sealed).decode()


def _opened(key: bytes, tenant: str, kind: str, sealed: str) -> str | None:
    """None for a text that was not sealed with this key for this tenant and type, or was changed."""
    from cryptography.exceptions import InvalidTag

    if not sealed.startswith(_VERSION) or len(sealed) > MAX_SEALED:
        return None
    try:
        raw = base64.b64decode(sealed.removeprefix(_VERSION), altchars=b"-_", validate=True)
        return _cipher(key).decrypt(raw, [tenant.encode(), kind.encode()]).decode() if raw else ""
    except (InvalidTag, ValueError, binascii.Error):
        return None


def _cipher(key: bytes):
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # most processes never seal anything

    return AESSIV(key)
