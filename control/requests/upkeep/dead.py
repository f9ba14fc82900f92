"""Dead letters: requests that crashed their group alone, until an operator tries them again or drops them."""

from __future__ import annotations

from dataclasses import dataclass

from control.constants import DEAD_LENGTH
from control.errors import LetterNotFound, RequestError
from control.keys import ModelKeys
from control.messages import GenerationRequest, decode_request
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Entry, read, run
from control.requests.enqueue import Enqueue, enqueue


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One entry of the stream. `seq` counts the log entries that the request had, `at_ms` is the server's clock."""

    entry: str
    rid: str
    tenant: str
    priority: str
    cause: str
    replica: str
    attempts: int
    prompt_tokens: int
    seq: int
    at_ms: int
    view: str
    params: GenerationRequest


def dead_letters(model: str) -> Call[list[DeadLetter]]:
    """All that are kept, newest first."""

    def parse(reply: list[Entry]) -> list[DeadLetter]:
        return [_letter(entry, fields) for entry, fields in reply]

    return read("XREVRANGE", ModelKeys(model).dead, "+", "-", "COUNT", 2 * DEAD_LENGTH, parse=parse)


def count_letters(model: str) -> Call[int]:
    """The number of those that are kept."""
    return read("XLEN", ModelKeys(model).dead, parse=int)


def dead_letter(client: SyncRedis, model: str, rid: str) -> DeadLetter:
    """The one of request `rid`. Raises LetterNotFound."""
    for letter in run(client, dead_letters(model)):
        if letter.rid == rid:
            return letter
    raise LetterNotFound(
        f"Model '{model}' has no dead letter of a request {rid!r}. `furrow dead list {model}` shows those that it has."
    )


def retry_letter(client: SyncRedis, model: str, letter: DeadLetter, rid: str) -> str:
    """Enqueue the request anew, from its prompt, and drop the letter; the id that it runs under.

    `rid` is fresh and unique: the old id's log has ended. A retry whose outcome was lost joins the first one. The
    new request runs without a follower. Raises QueueFull, RequestError for a request with images: they are gone.
    """
    if letter.params.images:
        raise RequestError(
            f"The request {letter.rid} has images, which are not kept after its end, so it can't be retried. Send it "
            "again with its images, or drop the letter."
        )
    again = Enqueue(
        rid=rid,
        model=model,
        params=letter.params,
        tenant=letter.tenant,
        priority=letter.priority,
        on_disconnect="continue",
        idempotency_key=f"dead-letter-{letter.entry}",
        body_hash=letter.rid,
        view=letter.view,
        received_ms=letter.at_ms,
    )
    enqueued = run(client, enqueue(again))
    run(client, drop_letter(model, letter))
    return enqueued.rid


def drop_letter(model: str, letter: DeadLetter) -> Call[bool]:
    """Forget it; False if it was gone already."""
    return read("XDEL", ModelKeys(model).dead, letter.entry, parse=bool)


def _letter(entry: str, fields: dict[str, str]) -> DeadLetter:
    return DeadLetter(
        entry=entry,
        rid=fields["rid"],
        tenant=fields["tenant"],
        priority=fields["priority"],
        cause=fields["cause"],
        replica=fields["replica"],
        attempts=int(fields["attempts"]),
        prompt_tokens=int(fields["prompt_tokens"]),
        seq=int(fields["seq"]),
        at_ms=int(fields["at"]),
        view=fields["view"],
        params=decode_request(fields["params"]),
    )
