"""Limits of an API key: requests and tokens per minute as buckets that fill evenly, and requests at one time.

A hold is what one call to the API takes: an estimate for each of its requests (`spend`). The script that ends a request
leaves a settlement in the model's slot, and any API process applies it to the key's (below): in a Cluster one script
can't touch keys of a model and of an API key. Limits may be wrong for a minute, bills may not, so usage is counted by
the script that ends the request. A reservation of the whole context would admit one request a minute, so tokens beyond
1,024 a choice become a debt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control import keys
from control.access.records import ApiKey
from control.errors import RateLimited
from control.keys import KeyKeys, ModelKeys
from control.redis.connection import Call, read

# --- Limits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allowance:
    """The remainder of a key's limits; 0 means no limit. `reset_*_ms`: time until that limit is whole again."""

    limit_requests: int
    remaining_requests: int
    reset_requests_ms: int
    limit_tokens: int
    remaining_tokens: int
    reset_tokens_ms: int


def spend(key: ApiKey, hold: str, model: str, estimates: Mapping[str, int]) -> Call[Allowance]:
    """Take one request and its estimated tokens for each of `estimates`, by request id. Sent twice, it takes once.

    Raises RateLimited, and takes nothing, where one of the limits has no room.
    """

    def parse(reply: list[Any]) -> Allowance:
        if reply[0] == "LIMIT":
            bound, wait_ms, *levels = reply[1:]
            limit = {"requests": key.rpm, "tokens": key.tpm, "concurrent": key.max_concurrent}[bound]
            raise RateLimited(bound, limit, int(wait_ms) / 1000, _allowance(key, levels))
        return _allowance(key, reply[1:])

    named = KeyKeys(key.id)
    taken = [word for rid, tokens in estimates.items() for word in (rid, tokens)]
    args = (hold, key.rpm, key.tpm, key.max_concurrent, model, *taken)
    return Call("spend", (named.bucket, named.spent(hold), named.open), args, parse)


def settle(key_id: str, hold: str, rid: str, tokens: int, *, ended: bool = True, counts: bool = True) -> Call[bool]:
    """The request took so many tokens: all of them once it has `ended`, else so far, and no less than was estimated.

    One that was refused `counts` as no request. False where it was settled before: a repeat changes nothing.
    """
    named = KeyKeys(key_id)
    args = (hold, rid, tokens, int(ended), int(counts))
    return Call("settle", (named.bucket, named.spent(hold), named.open, named.record), args, bool)


def open_requests(key: ApiKey) -> Call[dict[str, tuple[int, str]]]:
    """Of a key with `max_concurrent`: hold → (ms at which it began, model) of what holds its places."""

    def parse(reply: dict[str, str]) -> dict[str, tuple[int, str]]:
        pairs = {rid: text.split(" ", 1) for rid, text in reply.items()}
        return {rid: (int(began), model) for rid, (began, model) in pairs.items()}

    return read("HGETALL", KeyKeys(key.id).open, parse=parse)


def free_places(key: ApiKey, rids: Sequence[str]) -> Call[int]:
    """Requests that have ended hold their places no longer, though nobody settled them; their estimates stand."""
    return read("HDEL", KeyKeys(key.id).open, *rids, parse=int)


def _allowance(key: ApiKey, levels: list[Any]) -> Allowance:
    requests, requests_ms, tokens, tokens_ms = map(int, levels)
    return Allowance(key.rpm, requests, requests_ms, key.tpm, tokens, tokens_ms)


# --- Settlements -----------------------------------------------------------------------------------------------------

# Settlements: what requests of limited API keys took, from the model's slot to the key's.
#
# A model and a key are in different slots of a Cluster, so no script ends a request and changes its key's bucket. The
# script that ends it, and emit now and then while it runs, add a settlement to the model's stream. Any process reads
# it, applies it and deletes it. Applying one twice changes nothing, so no process has to own it, and each may die
# meanwhile.


MOST_READ = 128
"""Settlements read in one call."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """`tokens` are all that request `rid` took, or so far if it has not ended; `id` is its place in the stream."""

    id: str
    key_id: str
    hold: str
    rid: str
    tokens: int
    ended: bool

    def apply(self) -> Call[bool]:
        """Put the truth in the estimate's place; False where that was done before."""
        return settle(self.key_id, self.hold, self.rid, self.tokens, ended=self.ended)


def pending(model: str) -> Call[list[Settlement]]:
    """The oldest MOST_READ settlements of a model that nobody has deleted."""

    def parse(reply: list[tuple[str, dict[str, str]]] | None) -> list[Settlement]:
        return [
            Settlement(
                entry, fields["key"], fields["hold"], fields["rid"], int(fields["tokens"]), fields["ended"] == "1"
            )
            for entry, fields in reply or []
        ]

    return read("XRANGE", ModelKeys(model).settlements, "-", "+", "COUNT", MOST_READ, parse=parse)


def forget(model: str, settlements: Sequence[Settlement]) -> Call[int]:
    """Delete settlements that were applied."""
    return read("XDEL", ModelKeys(model).settlements, *(one.id for one in settlements), parse=int)


def metered_models() -> Call[set[str]]:
    """Every model that may have settlements, the unloaded ones included."""

    def parse(reply: Any) -> set[str]:
        return set(reply)

    return read("SMEMBERS", keys.METERED, parse=parse)
