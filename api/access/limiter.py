"""The limits of an API key at work: an estimate is taken before a request is queued, the truth is told at its end.

A key without limits costs nothing here, not even a read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from api.access.keyring import LANE
from control.access import Allowance, ApiKey, free_places, open_requests, settle, spend
from control.batches import Batches
from control.clock import now_ms
from control.connection import read
from control.errors import RateLimited, RedisUnavailable, RequestTooLarge
from control.keys import ModelKeys
from control.messages import GenerationRequest

log = structlog.stdlib.get_logger(__name__)

EXPECTED_TOKENS = 1_024
"""What a choice is taken to write at most when it begins; what it writes beyond that is paid at its end."""
_YOUNG_MS = 10_000
"""A request that is not there may be about to be queued."""
_LAST_S = 5.0


@dataclass(frozen=True, slots=True)
class Hold:
    """What one request took of its key's limits, until it is settled."""

    limiter: Limiter
    key: ApiKey
    rid: str
    requests: int
    ends_with_client: bool
    """Whether nobody goes on with it once the client has left."""

    def settle(self, tokens: int) -> None:
        """It has ended, and took so many tokens. Returns at once."""
        self.limiter.settle(self.key, self.rid, self.requests, tokens)

    def refund(self) -> None:
        """It was refused: nothing counts."""
        self.limiter.settle(self.key, self.rid, 0, 0)


class Limiter:
    """Takes and gives back; `stop` waits for what is under way."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._settling: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        key: ApiKey | None,
        rid: str,
        model: str,
        members: Sequence[GenerationRequest],
        on_disconnect: str,
        tell: Callable[[Allowance], None],
    ) -> Hold | None:
        """Take what `members` will need, and tell what is left; None for a key without limits.

        Raises RateLimited, RequestTooLarge for what the limits can never let in, RedisUnavailable.
        """
        if key is None or not key.limited:
            return None
        count, tokens = len(members), estimate(key, members)
        try:
            allowance = await self._spend(key, rid, model, count, tokens)
        except RateLimited as error:
            if isinstance(error.allowance, Allowance):
                tell(error.allowance)
            raise
        tell(allowance)
        return Hold(self, key, rid, count, on_disconnect == "cancel")

    def held(self, key: ApiKey | None, rid: str, members: int) -> Hold | None:
        """What another process, or an earlier connection, took for a request that is followed here now."""
        return Hold(self, key, rid, members, False) if key is not None and key.limited else None

    def settle(self, key: ApiKey, rid: str, requests: int, tokens: int) -> None:
        task = asyncio.create_task(self._settle(key, rid, requests, tokens))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def stop(self) -> None:
        if self._settling:
            await asyncio.wait(self._settling, timeout=_LAST_S)

    async def _spend(self, key: ApiKey, rid: str, model: str, count: int, tokens: int) -> Allowance:
        call = spend(key, rid, model, count, tokens)
        try:
            return await self._batches.run(LANE, call)
        except RateLimited as error:
            # The processes that began them may have died before they could give the places back.
            if error.bound != "concurrent" or not await self._free_places(key):
                raise
        return await self._batches.run(LANE, call)

    async def _free_places(self, key: ApiKey) -> bool:
        """Give back the places of requests that have ended; whether there were any."""
        held = await self._batches.run(LANE, open_requests(key))
        looks = [
            read("HGET", ModelKeys(model).request(rid), "state", parse=lambda state: state)
            for rid, (_, model) in held.items()
        ]
        over: list[str] = []
        for (rid, (began, _)), state in zip(held.items(), await self._batches.run_all(LANE, looks), strict=True):
            ended = now_ms() - began > _YOUNG_MS if state is None else state not in ("queued", "running")
            if ended and not isinstance(state, Exception):
                over.append(rid)
        # Their estimate stands: what they took in truth is not known here.
        if over:
            await self._batches.run(LANE, free_places(key, over))
        return bool(over)

    async def _settle(self, key: ApiKey, rid: str, requests: int, tokens: int) -> None:
        try:
            await self._batches.run(LANE, settle(key, rid, requests, tokens))
        except RedisUnavailable as error:
            # The estimate stands, and a place that stays taken is looked after by the next request that wants it.
            log.warning("could not settle a request's limits", action="settle", rid=rid, key=key.id, error=str(error))


def estimate(key: ApiKey, members: Sequence[GenerationRequest]) -> int:
    """Tokens that a request is taken to need: its prompts, and what its choices may write, within the key's limit.

    Raises RequestTooLarge where the limit could never let it in.
    """
    prompt = sum(len(member.prompt) for member in members)
    if key.tpm and prompt > key.tpm:
        raise RequestTooLarge(
            f"The prompt has {prompt} tokens; this API key may use {key.tpm} a minute. Shorten the prompt.",
            code="request_exceeds_limit",
        )
    if key.rpm and len(members) > key.rpm:
        raise RequestTooLarge(
            f"{len(members)} prompts count as so many requests; this API key may send {key.rpm} a minute. Send fewer.",
            param="prompt",
            code="request_exceeds_limit",
        )
    answers = sum(member.sampling.n * min(member.sampling.max_tokens, EXPECTED_TOKENS) for member in members)
    return min(prompt + answers, key.tpm) if key.tpm else prompt + answers
