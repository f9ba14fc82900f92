"""A client's request, checked against its model and ready to be queued: its members, deadline and policy."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import msgspec

from api.access.limits import ratelimit_headers
from api.generation.caller import Caller
from api.generation.prefix_scope import scoped_salt
from api.models.served import ServedModel
from api.schemas.embeddings import InputFields
from api.schemas.generation import CommonFields
from api.schemas.view import View
from api.settings import ApiSettings
from control.access import Allowance
from control.errors import RequestError
from control.messages import GenerationRequest
from control.requests import Enqueue, member_rid
from control.requests.bounds import LONGEST_S, RANGES, shown

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One client request: one member of the queue for each of its prompts, or for a pack of its inputs."""

    caller: Caller
    served: ServedModel
    members: list[GenerationRequest]
    priority: str
    deadline_ms: int
    on_disconnect: str

    @property
    def prompt_tokens(self) -> int:
        return sum(len(member.prompt) for member in self.members)

    def view(self, member: int = 0) -> View:
        """How the answer is shown."""
        raise NotImplementedError

    def tell_allowance(self, allowance: Allowance) -> None:
        """Put the key's remaining limits into the response's headers."""
        self.caller.headers.update(ratelimit_headers(allowance))

    def enqueue(self, first: str, member: int, settings: ApiSettings) -> Enqueue:
        """The enqueue of one member of the answer whose first request is `first`."""
        key = self.caller.idempotency_key
        params = self.members[member]
        salt = scoped_salt(self.caller.identity.owner, settings.share_prefixes, params.cache_salt)
        return Enqueue(
            rid=member_rid(first, member),
            model=self.served.name,
            params=msgspec.structs.replace(params, cache_salt=salt),
            tenant=self.caller.tenant,
            account=self.caller.identity.account,
            hold=self.caller.rid if self.caller.identity.limited else "",
            priority=self.priority,
            deadline_ms=self.deadline_ms,
            on_disconnect=self.on_disconnect,
            api=settings.api_id,
            idempotency_key=f"{key}#{member}" if key and member else key,
            body_hash=self.caller.body_hash,
            view=self.view(member).encode(),
            received_ms=self.caller.request_log.received_ms,
            keep_ms=round(1000 * settings.keep_requests),
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            # The class low is for work without a reader: it may wait for any time.
            max_queue_wait_ms=0 if self.priority == "low" else round(1000 * settings.max_queue_wait),
        )


def deadline_ms(body: CommonFields | InputFields) -> int:
    """Milliseconds from now, 0 for none. Raises RequestError for both fields at once, or a moment that has passed."""
    if body.timeout is not None and body.deadline is not None:
        raise RequestError("'timeout' and 'deadline' are both set; send one of them.", param="deadline")
    if body.timeout is not None:
        return max(1, round(body.timeout * 1000))
    if body.deadline is None:
        return 0
    left = body.deadline - time.time()
    if left <= 0:
        raise RequestError(
            f"'deadline' ({body.deadline}) has passed; it is a moment in Unix seconds.", param="deadline"
        )
    if left > LONGEST_S:
        raise RequestError(
            f"'deadline' ({body.deadline}) is more than a day ({LONGEST_S} seconds) away; it is a moment in Unix "
            "seconds, and a request lives for a day at most.",
            param="deadline",
        )
    return max(1, round(left * 1000))


def on_disconnect_policy(field: str | int | float | None, header: str | None) -> str:
    """The policy as control takes it: cancel, continue, or whole seconds. The body's field goes before the header."""
    value = header if field is None else field
    if value is None:
        return "cancel"
    if value in ("cancel", "continue"):
        return str(value)
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        seconds = math.nan
    known = RANGES["on_disconnect"]
    if not known.holds(seconds):
        given = repr(value[:_SHOWN_CHARACTERS]) if isinstance(value, str) else shown(value)
        raise RequestError(
            f"Invalid value for 'on_disconnect': {given}; use 'cancel', 'continue' or a number of seconds {known}.",
            param="on_disconnect",
        )
    return str(math.ceil(seconds))
