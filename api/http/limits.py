"""Limits of an API key: an estimate is charged before a request is queued, and settled once it has ended.

Settlements are applied for the requests of all processes; the same work done twice is harmless. What is left of the
limits is shown in headers, in OpenAI's and in Anthropic's names and formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog

from api.http.gate import KEYS_LANE
from api.http.tasks import PeriodicTask
from control.access import (
    MOST_READ,
    Allowance,
    ApiKey,
    forget,
    free_places,
    metered_models,
    open_requests,
    pending,
    settle,
    spend,
)
from control.clock import now_ms
from control.errors import RateLimited, RedisUnavailable, RequestTooLarge
from control.keys import ModelKeys
from control.messages import GenerationRequest
from control.redis.connection import Batches, read

log = structlog.stdlib.get_logger(__name__)

EXPECTED_TOKENS = 1_024
"""The estimate of a choice's tokens when it begins. Tokens beyond it are charged while it runs."""
_YOUNG_MS = 10_000
"""A request that is not there may be about to be queued."""
_LAST_S = 5.0

SWEEP_S = 2.0
"""Mean time between looks at all models, for requests that no process follows."""
HOT_S = 2.0
"""A model is looked at for so long after a client's request is over: its leader may end it a moment later."""
HOT_EVERY_S = 0.25


class Settler:
    """Looks at once at a model of which a request may have ended, now and then at all models, and at `stop`."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._hot: dict[str, float] = {}
        """Model → the time of this loop until which it is looked at."""
        self._sweep_at = 0.0
        self._task = PeriodicTask("settle", self._settle, self._until_next, retry_s=SWEEP_S)
        self.start = self._task.start

    async def stop(self) -> None:
        await self._task.stop()
        with contextlib.suppress(RedisUnavailable):
            await self._apply_all(self._hot)

    def nudge(self, model: str) -> None:
        """A request of a limited key is over, or soon will be. Returns at once."""
        self._hot[model] = asyncio.get_running_loop().time() + HOT_S
        self._task.wake()

    async def apply(self, model: str) -> bool:
        """Apply all settlements of a model; True if there were any. Raises RedisUnavailable."""
        applied = False
        while True:
            settlements = await self._batches.run(model, pending(model))
            if not settlements:
                return applied
            applied = True
            outcomes = await self._batches.run_all(KEYS_LANE, [settlement.apply() for settlement in settlements])
            done = [
                settlement
                for settlement, outcome in zip(settlements, outcomes, strict=True)
                if isinstance(outcome, bool)
            ]
            if done:
                await self._batches.run(model, forget(model, done))
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            if len(settlements) < MOST_READ:
                return applied

    async def _settle(self) -> None:
        clock = asyncio.get_running_loop().time
        now = clock()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S * random.uniform(0.5, 1.5)  # so that the processes do not read all at once
            await self._apply_all(await self._batches.run(KEYS_LANE, metered_models()))
        else:
            await self._apply_all(self._hot)
        self._hot = {model: until for model, until in self._hot.items() if until > clock()}

    def _until_next(self) -> float:
        """Seconds until the next look at hot models, or the next sweep."""
        until_sweep = self._sweep_at - asyncio.get_running_loop().time()
        return min(HOT_EVERY_S, until_sweep) if self._hot else until_sweep

    async def _apply_all(self, models: Iterable[str]) -> None:
        for outcome in await asyncio.gather(*(self.apply(model) for model in models), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


Refund = Callable[[int], None]
"""Refunds the requests from this number on: they were never queued, and nothing of them counts. Returns at once."""


class Limiter:
    """Charges estimates to keys, and refunds them; `stop` waits for refunds under way."""

    def __init__(self, batches: Batches, settler: Settler) -> None:
        self._batches = batches
        self.settler = settler
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
            return await self._batches.run(KEYS_LANE, call)
        except RateLimited as error:
            # Requests that ended a moment ago may not be settled yet.
            settled = await self.settler.apply(model)
            freed = error.bound == "concurrent" and await self._free_places(key)
            if not (settled or freed):
                raise
        return await self._batches.run(KEYS_LANE, call)

    async def _free_places(self, key: ApiKey) -> bool:
        """Free the places of requests whose end Redis has forgotten; True if there were any."""
        places = await self._batches.run(KEYS_LANE, open_requests(key))
        looks = [
            read("HGET", ModelKeys(model).request(rid), "state", parse=lambda state: state)
            for rid, (_, model) in places.items()
        ]
        over: list[str] = []
        for (rid, (began, _)), state in zip(places.items(), await self._batches.run_all(KEYS_LANE, looks), strict=True):
            ended = now_ms() - began > _YOUNG_MS if state is None else state not in ("queued", "running")
            if ended and not isinstance(state, Exception):
                over.append(rid)
        # Their estimate stands: what they took in truth is not known here.
        if over:
            await self._batches.run(KEYS_LANE, free_places(key, over))
        return bool(over)

    async def _refund(self, key: ApiKey, hold: str, rids: Sequence[str]) -> None:
        calls = [settle(key.id, hold, rid, 0, counts=False) for rid in rids]
        for outcome in await self._batches.run_all(KEYS_LANE, calls):
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
    remaining = key.tpm - prompt
    estimates = list[int]()
    for member in members:
        answers = member.sampling.n * min(member.sampling.max_tokens, EXPECTED_TOKENS)
        answers = min(answers, remaining) if key.tpm else answers
        estimates.append(len(member.prompt) + answers)
        remaining -= answers
    return estimates


def ratelimit_headers(allowance: Allowance) -> dict[str, str]:
    """OpenAI's headers of a key's limits; none for a limit that the key does not have."""
    headers: dict[str, str] = {}
    for kind, limit, remaining, reset_ms in _limits(allowance):
        headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(remaining)
        headers[f"x-ratelimit-reset-{kind}"] = duration(reset_ms)
    return headers


def anthropic_ratelimit_headers(allowance: Allowance, now_s: float) -> dict[str, str]:
    """The same as Anthropic has them; `now_s` in Unix seconds."""
    headers: dict[str, str] = {}
    for kind, limit, remaining, reset_ms in _limits(allowance):
        headers[f"anthropic-ratelimit-{kind}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{kind}-remaining"] = str(remaining)
        headers[f"anthropic-ratelimit-{kind}-reset"] = moment(now_s + reset_ms / 1000)
    return headers


def _limits(allowance: Allowance) -> Iterator[tuple[str, int, int, int]]:
    """Name, limit, what is left, and milliseconds until it is whole, of each limit that there is."""
    if allowance.limit_requests:
        yield "requests", allowance.limit_requests, allowance.remaining_requests, allowance.reset_requests_ms
    if allowance.limit_tokens:
        yield "tokens", allowance.limit_tokens, allowance.remaining_tokens, allowance.reset_tokens_ms


def moment(unix_s: float) -> str:
    """The next whole second in UTC, as RFC 3339 writes it: a client that retries then is not too early."""
    at = datetime.datetime.fromtimestamp(math.ceil(unix_s), datetime.UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(ms: int) -> str:
    """As Go writes it: `0s`, `120ms`, `1.5s`, `6m0s`, `1h0m3.25s`."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"
