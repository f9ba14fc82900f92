"""Limits of an API key: an estimate is charged before a request is queued, and settled once it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from api.access.keyring import LANE
from api.access.settler import Settler
from control.access import Allowance, ApiKey, free_places, open_requests, settle, spend
from control.clock import now_ms
from control.errors import RateLimited, RedisUnavailable, RequestTooLarge
from control.keys import ModelKeys
from control.messages import GenerationRequest
from control.redis.batches import Batches
from control.redis.connection import read

log = structlog.stdlib.get_logger(__name__)

EXPECTED_TOKENS = 1_024
"""The estimate of a choice's tokens when it begins. Tokens beyond it are charged while it runs."""
_YOUNG_MS = 10_000
"""A request that is not there may be about to be queued."""
_LAST_S = 5.0


Refund = Callable[[int], None]
"""Refunds the requests from this number on: they were never queued, and nothing of them counts. Returns at once."""


class Limiter:
    """Charges estimates to keys, and refunds them; `stop` waits for refunds under way."""

    def __init__(self, batches: Batches, settler: Settler) -> None:
        self._batches, self._settler = batches, settler
        self._refunding: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        key: ApiKey | None,
        model: str,
        members: Mapping[str, GenerationRequest],
        tell: Callable[[Allowance], None],
    ) -> Refund:
        """Charge the estimates of `members`, by request id, and tell what is left; a key without limits costs no read.

        Raises RateLimited, RequestTooLarge, RedisUnavailable.
        """
        if key is None or not key.limited:
            return lambda first: None
        rids = list(members)
        estimates = dict(zip(rids, estimate(key, list(members.values())), strict=True))
        try:
            allowance = await self._spend(key, rids[0], model, estimates)
        except RateLimited as error:
            if isinstance(error.allowance, Allowance):
                tell(error.allowance)
            raise
        tell(allowance)

        def refund(first: int) -> None:
            task = asyncio.create_task(self._refund(key, rids[0], rids[first:]))
            self._refunding.add(task)
            task.add_done_callback(self._refunding.discard)

        return refund

    async def stop(self) -> None:
        if self._refunding:
            await asyncio.wait(self._refunding, timeout=_LAST_S)

    async def _spend(self, key: ApiKey, hold: str, model: str, estimates: Mapping[str, int]) -> Allowance:
        call = spend(key, hold, model, estimates)
        try:
            return await self._batches.run(LANE, call)
        except RateLimited as error:
            # Requests that ended a moment ago may not be settled yet.
            settled = await self._settler.apply(model)
            freed = error.bound == "concurrent" and await self._free_places(key)
            if not (settled or freed):
                raise
        return await self._batches.run(LANE, call)

    async def _free_places(self, key: ApiKey) -> bool:
        """Free the places of requests whose end Redis has forgotten; True if there were any."""
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

    async def _refund(self, key: ApiKey, hold: str, rids: Sequence[str]) -> None:
        calls = [settle(key.id, hold, rid, 0, counts=False) for rid in rids]
        for outcome in await self._batches.run_all(LANE, calls):
            if isinstance(outcome, RedisUnavailable):
                # The estimate stands, and a place that stays taken is looked after by the next request that wants it.
                log.warning("could not refund a request", action="refund", rid=hold, key=key.id, error=str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome


def estimate(key: ApiKey, members: Sequence[GenerationRequest]) -> list[int]:
    """Tokens that each request may need, within the key's limit. Raises RequestTooLarge where that never lets it in."""
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
    left, estimates = key.tpm - prompt, list[int]()
    for member in members:
        answers = member.sampling.n * min(member.sampling.max_tokens, EXPECTED_TOKENS)
        answers = min(answers, left) if key.tpm else answers
        estimates.append(len(member.prompt) + answers)
        left -= answers
    return estimates
