"""The sender of one HTTP request: identity, headers, request log."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from api.access.gate import ANONYMOUS, Identity
from api.asgi.client import Client
from api.errors.errors import ClientDisconnected
from api.images.loading import RequestImages
from api.observability.request_log import RequestLog
from api.schemas.decoding import Warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of one HTTP request: its identity and what its headers say."""

    request_log: RequestLog
    tenant: str = ""
    identity: Identity = ANONYMOUS
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers of the response, filled while the request is handled."""
    warnings: Warnings = field(default_factory=Warnings)
    """Parts of the request that were accepted without an effect, filled while it is read."""
    images: RequestImages = field(default_factory=RequestImages)
    """Its images that are loaded; empty once they belong to the request."""
    idempotency_key: str = ""
    body_hash: str = ""
    body_bytes: int = 0
    on_disconnect: str | None = None
    client_request_id: str | None = None
    rid: str = ""
    """Fresh for every HTTP request; never what the client sent as X-Request-ID."""
    client: Client = field(default_factory=Client)
    """Its connection: whether it is still there."""

    def identified(self, tenant: str, body: bytes = b"", idempotency_key: str = "") -> Caller:
        """The same caller with its tenant, its body's size and its Idempotency-Key."""
        body_hash = hashlib.sha256(body).hexdigest() if idempotency_key else ""
        return replace(self, tenant=tenant, body_hash=body_hash, body_bytes=len(body), idempotency_key=idempotency_key)

    def check_present(self, on_disconnect: str | int | float | None) -> None:
        """Raises ClientDisconnected for a client that has left, unless its request is to go on then.

        `on_disconnect` is the body's field, which goes before the header.
        """
        policy = self.on_disconnect if on_disconnect is None else on_disconnect
        if policy in (None, "cancel") and self.client.gone():
            raise ClientDisconnected
