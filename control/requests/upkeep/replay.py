"""Requests that were kept with their prompt after their end, computed once more and compared.

They are kept by `--keep-requests`, in the request's own keys, or by `store` of a chat completion, in its record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from control.errors import RequestNotFound
from control.keys import ModelKeys
from control.messages import GenerationRequest, LogEntry, decode_request
from control.records.responses import StoredRequest, stored_request, storing_owners
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every
from control.requests.enqueue import Enqueue, enqueue
from control.requests.token_log import decode_entries, read_pages

TENANT = "furrow-replay"
"""Tenant of the requests that replay others."""
OWNERS_AT_ONCE = 256
"""Owners whose records are looked through in one round trip."""
COMPARED_ENDS = ("stop", "length")
"""Ends that follow from tokens; a cancel, a deadline and a failure don't."""


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A request that has ended, with its prompt, its parameters and its token log."""

    model: str
    rid: str
    params: GenerationRequest
    entries: list[LogEntry]

    @property
    def tokens(self) -> int:
        """Tokens of its longest choice."""
        counts = [0] * self.params.sampling.n
        for entry in self.entries:
            counts[entry.choice] += entry.token is not None
        return max(counts)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first entry of a choice that differs: `then` is the kept one, `now` the other; None where there is none."""

    choice: int
    position: int
    then: LogEntry | None
    now: LogEntry | None


def find_kept(client: SyncRedis, models: Iterable[str], rid: str) -> KeptRequest:
    """Raises RequestNotFound where no model has the request, where it runs, where its prompt was not kept, or where it
    has images."""
    names = list(models)
    ended = False
    params_of_models = run_every(client, [_look(model, rid) for model in names])
    for model, (state, params) in zip(names, params_of_models, strict=True):
        if state in ("queued", "running"):
            raise RequestNotFound(f"Request {rid!r} has not ended. Wait until it has.")
        ended = ended or state is not None
        if params is None:
            continue
        decoded = decode_request(params)
        if decoded.images:
            raise RequestNotFound(f"Request {rid!r} has images, which are not kept. It can't be replayed.")
        entries = [entry for page in read_pages(client, model, rid) for entry in page]
        return KeptRequest(model, rid, decoded, entries)
    if (record := _stored_chat(client, rid)) is not None:
        return _of_record(rid, record, names)
    if ended:
        raise RequestNotFound(
            f"The prompt of request {rid!r} was not kept. Start the API with --keep-requests SECONDS, or send a chat "
            "with 'store': true, and ask again."
        )
    raise RequestNotFound(
        f"No request {rid!r} in any model, and no stored chat completion. Its time of --keep-requests or "
        "--response-ttl may be over."
    )


def _stored_chat(client: SyncRedis, rid: str) -> StoredRequest | None:
    """The stored chat of any owner: a rid does not tell its owner."""
    owners = run(client, storing_owners())
    for start in range(0, len(owners), OWNERS_AT_ONCE):
        batch = owners[start : start + OWNERS_AT_ONCE]
        for record in run_every(client, [stored_request(rid, owner) for owner in batch]):
            if record is not None:
                return record
    return None


def _of_record(rid: str, record: StoredRequest, models: list[str]) -> KeptRequest:
    if not record.ended:
        raise RequestNotFound(f"Request {rid!r} has not ended. Wait until it has.")
    if not record.params or not record.entries:
        raise RequestNotFound(
            f"The chat completion {rid!r} was stored without its prompt: it has images, was too large for the quota of "
            "stored responses, or was stored by another version. It can't be replayed."
        )
    if record.model not in models:
        raise RequestNotFound(f"The model {record.model!r} of request {rid!r} is not loaded. Load it, and ask again.")
    return KeptRequest(record.model, rid, decode_request(record.params), decode_entries(record.entries))


def replay(client: SyncRedis, past: KeptRequest, rid: str) -> None:
    """Enqueue the request once more as `rid`, with its seed, as long as it was. Raises QueueFull."""
    sampling = msgspec.structs.replace(past.params.sampling, max_tokens=past.tokens or past.params.sampling.max_tokens)
    params = msgspec.structs.replace(past.params, sampling=sampling)
    request = Enqueue(rid=rid, model=past.model, params=params, tenant=TENANT, priority="low", on_disconnect="continue")
    run(client, enqueue(request))


def differences(past: KeptRequest, entries: list[LogEntry]) -> list[Difference]:
    """The first difference of each choice, in token, log probabilities or end."""
    first_ones: list[Difference] = []
    for choice in range(past.params.sampling.n):
        then = _of_choice(past.entries, choice)
        now = _of_choice(entries, choice)
        ended = bool(then) and then[-1].finish in COMPARED_ENDS
        for position in range(max(len(then), len(now)) if ended else len([entry for entry in then if _tells(entry)])):
            first = then[position] if position < len(then) else None
            second = now[position] if position < len(now) else None
            if first is None or second is None or _content(first, ended) != _content(second, ended):
                first_ones.append(Difference(choice, position, first, second))
                break
    return first_ones


def fingerprints(entries: list[LogEntry]) -> list[str]:
    """The backends that computed the entries, in their order."""
    return [entry.fingerprint for entry in entries if entry.fingerprint is not None]


def _of_choice(entries: list[LogEntry], choice: int) -> list[LogEntry]:
    return [entry for entry in entries if entry.choice == choice]


def _tells(entry: LogEntry) -> bool:
    return entry.token is not None or entry.prompt is not None


def _content(entry: LogEntry, ended: bool) -> tuple[object, ...]:
    """An entry without its number and its count of cached tokens; with its end if that follows from the tokens."""
    return entry.token, entry.logprobs, entry.prompt, entry.vector, (entry.finish, entry.cause) if ended else None


def _look(model: str, rid: str) -> Call[tuple[str | None, str | None]]:
    def parse(reply: list[str | None]) -> tuple[str | None, str | None]:
        state, params = reply
        return state, params

    return read("HMGET", ModelKeys(model).request(rid), "state", "params", parse=parse)
