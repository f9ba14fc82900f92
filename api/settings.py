"""The settings of one API process."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field

from api.http.bodies import BodyLimits
from api.http.connection import ConnectionLimits
from api.schemas.view import CallFormat
from control.listening import is_loopback


def _api_id() -> str:
    """Unique per process and per start: a restarted process must not inherit the followers of its former life."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Times are in seconds."""

    redis_url: str
    served_model_names: tuple[str, ...] = ()
    """Aliases: `public` names the only model, `public=model` one of several, `*` lets any name mean the only model."""
    api_keys: tuple[str, ...] = ()
    """Fixed secrets that open this process, beside the farm's own keys. If any are given, a key is asked for."""
    require_keys: bool = False
    """True if a request must have a key."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser; `*`: all."""
    strict: bool = False
    """True if a request is refused whose limit of tokens is more than what is left of the context, or that has a field
    without an effect."""
    tool_parser: CallFormat | None = None
    """The form in which every model writes its calls; None: what its template shows."""
    response_template: str | None = None
    """The path of a response template that is read in place of each model's own."""
    chat_template: str | None = None
    """The path of a chat template that is rendered in place of each model's own."""
    trusted_templates: tuple[str, ...] = ()
    """Names of models, and SHA-256 of chat templates, whose templates are rendered without bounds of work."""
    api_id: str = field(default_factory=_api_id)
    host: str = "127.0.0.1"
    port: int = 8000
    ollama_port: int | None = None
    """A second port, for clients that look for Ollama's; None: there is none."""
    body_limits: BodyLimits = field(default_factory=BodyLimits)
    max_queued_requests: int = 4096
    max_queued_tokens: int = 16 * 1024 * 1024
    max_queue_wait: float = 60.0
    """Beyond an expected wait of so long a request is refused, unless its priority is low; 0: never."""
    keep_alive: float = 10.0
    early_refusal: float = 2.0
    """Seconds for which the headers of a stream wait for the claim."""
    max_load_wait: float = 0.0
    """Seconds for which a client waits while its model is loaded; 0: as long as it takes."""
    wait_warning: float = 2.0
    silence: float = 0.5
    """Without news of a request for so long, its log is read."""
    lost_wait: float = 10.0
    """Seconds for which a client waits for a request that Redis has lost, and that another process may bring back."""
    response_ttl: float = 86_400.0
    """Seconds for which a stored response is kept, from its end or from its last use by a later one; 0: none is
    stored."""
    response_bytes: int | None = None
    """Quota of one owner's stored responses; None: a part of Redis' memory (`api.generation.archive`)."""
    response_number: int = 100_000
    """The number of stored responses that one owner may have."""
    keep_requests: float = 0.0
    """Seconds for which prompt and tokens of a request that has ended are kept, for `furrow replay`."""
    console_text: bool = False
    """True if operators are shown prompts and answers of all tenants."""
    image_hosts: tuple[str, ...] = ()
    """Hosts that images are fetched from, as `api.images.fetching` reads them; empty: none is fetched."""
    share_prefixes: tuple[str, ...] = ()
    """Tenants whose requests begin with each other's cached prefixes, or `all`; others share within the tenant."""
    grace: float = 30.0
    """Seconds for which open streams may go on after SIGTERM."""
    reader_timeout: float = 60.0
    """Seconds for which a client may take nothing while data waits for it."""
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)

    @property
    def asks_for_key(self) -> bool:
        return self.require_keys or bool(self.api_keys)

    @property
    def farm_open(self) -> bool:
        """True if the operator's routes need no key: on loopback only, where no key is required."""
        return not self.asks_for_key and is_loopback(self.host)
