"""The session of one generation: the feeds of its members, the renderer of its answer, and its request log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from api.chat.piece import Piece
from api.errors.errors import CLIENT_LEFT, CLIENT_LEFT_TEXT, ClientDisconnected, StreamInterrupted
from api.follow.feed import Feed
from api.follow.follow import Follower
from api.generation.archive import Archive
from api.observability.request_log import RequestLog
from api.rendering.rendering import StreamRenderer
from api.schemas.view import View
from api.settings import ApiSettings
from control.clock import now_ms
from control.messages import LogEntry
from control.requests.upkeep.orphans import GRACE_MS

TURN_ENTRIES, TURN_SCORED, TURN_PROMPTS = 1024, 64, 1
"""Entries of the log that one turn of the event loop renders: some milliseconds. With twenty log probabilities an entry
costs thirty times as much, and one of a prompt has many tokens."""


def _turn_of(view: View) -> int:
    if view.prompt_logprobs is not None or (view.echo and view.logprobs is not None):
        return TURN_PROMPTS
    return TURN_ENTRIES if view.logprobs is None else TURN_SCORED


@dataclass(eq=False, kw_only=True)
class Session:
    """One client that follows one answer. `release` must be called once the client has all of it, or has left."""

    rid: str
    renderer: StreamRenderer
    feeds: list[Feed]
    wake: asyncio.Event
    request_log: RequestLog
    follower: Follower
    settings: ApiSettings
    interrupted: Callable[[], bool]
    """Returns True once this process is about to end."""
    stalled: Callable[[], bool]
    """Returns True once the connection was cut because the client read nothing."""
    archive: Archive
    owner: str
    """The owner whose quota the stored answer takes."""
    settle_limits: Callable[[], None] | None = None
    """Has the API key's limits settled soon after the end; None where it has none."""
    _warned: float = field(default=0.0, init=False)
    _released: bool = field(default=False, init=False)
    _alarm: asyncio.TimerHandle | None = field(default=None, init=False)

    @property
    def position(self) -> int | None:
        """The worst queue position of the members that still wait."""
        waiting = [feed.position for feed in self.feeds if feed.have == 0 and feed.position is not None]
        return max(waiting, default=None)

    @property
    def started(self) -> bool:
        """True once a leader has claimed the request, or its end is known."""
        return any(feed.have or feed.error or feed.fields.get("state", "queued") != "queued" for feed in self.feeds)

    async def wait(self, seconds: float) -> None:
        """Wait for news, at most so long, or less. The caller clears `wake` before it looks at the feeds."""
        if self.wake.is_set():
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        # Most waits end with a token soon: an alarm that is set already is left as it is, and may wake for nothing.
        if self._alarm is None or self._alarm.when() > until:
            self._disarm()
            self._alarm = loop.call_at(until, self._ring)
        await self.wake.wait()

    def _ring(self) -> None:
        self._alarm = None
        self.wake.set()

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def take(self) -> Iterator[tuple[int, list[LogEntry]]]:
        """Entries of each member for one turn of the event loop; `wake` is set if more are ready."""
        left = _turn_of(self.renderer.view)
        for member, feed in enumerate(self.feeds):
            if not left:
                self.wake.set()
                return
            if entries := feed.take(left):
                left -= len(entries)
                yield member, entries

    async def rest(self) -> None:
        """Yield to the other streams if more entries are ready."""
        if self.wake.is_set():
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait for the claim, the first token or an early refusal, so that the status line can be honest."""
        until = self.settings.early_refusal
        while not self.started and self.request_log.waited < until and not self.interrupted():
            self.wake.clear()
            await self.wait(until - self.request_log.waited)
        self.wake.set()

    def early_failure(self) -> Exception | None:
        """The error of a request that ended before its first token, while the status line is still open."""
        for member, feed in enumerate(self.feeds):
            if feed.error is not None and feed.have == 0:
                return feed.error
            if feed.ended_without_token:
                self.renderer.feed(member, feed.take())
        return self.renderer.failure

    async def collect(self, left: Callable[[], bool] = lambda: False) -> list[Piece]:
        """All choices' text, once all have ended. Raises what ended the request from outside.

        Raises ClientDisconnected when it is woken and `left` says that nobody waits for the answer.
        """
        renderer, request_log = self.renderer, self.request_log
        pieces = renderer.empty_pieces()
        while not renderer.finished:
            self.wake.clear()
            self.check_interrupted()
            progress = False
            for member, entries in self.take():
                renderer.collect(pieces, member, entries)
                progress = True
            if progress:
                request_log.first_token()
                await self.rest()
                continue
            for feed in self.feeds:
                if feed.error is not None:
                    raise feed.error
            if left():
                raise ClientDisconnected
            await self.wait(self.settings.wait_warning)
            self.warn_if_waiting()
        return pieces

    async def store(self) -> None:
        """Complete the stored answer, where it is one that is stored, before the client is told that it has ended."""
        if (body := self.renderer.to_store) is not None:
            await self.archive.complete(self.rid, self.owner, body)

    def warn_if_waiting(self) -> bool:
        """Log every two seconds that no token has come yet; True if this call wrote the line."""
        request_log = self.request_log
        if not request_log.before_first_token or request_log.waited - self._warned < self.settings.wait_warning:
            return False
        self._warned = request_log.waited
        request_log.still_waiting(self.position)
        return True

    def left(self) -> None:
        """The connection is gone before the end: the client closed it, or read nothing, or this process stops."""
        if self.stalled():
            text = "cut: the client read nothing"
        else:
            text = "cut by shutdown" if self.interrupted() else CLIENT_LEFT_TEXT
        self.release(status=CLIENT_LEFT, error=text)

    def check_interrupted(self) -> None:
        """Raises StreamInterrupted, telling where to go on, once this process is about to end."""
        if self.interrupted():
            raise StreamInterrupted(self.rid, self.renderer.place)

    def release(self, *, status: int, error: str | None = None, delivered: bool = False) -> None:
        """Stop following and write the terminal line; later calls do nothing."""
        if self._released:
            return
        self._released = True
        self._disarm()
        # Where this process cut the client off, the client has not left: it gets time to resume, here or elsewhere.
        grace_ms = GRACE_MS if not delivered and (self.interrupted() or self.stalled()) else 0
        for feed in self.feeds:
            self.follower.leave(feed, now_ms() if delivered else None, grace_ms)
        if self.settle_limits is not None:
            self.settle_limits()
        reasons = {reason or "disconnected" for answer in self.renderer.answers for reason in answer.finish_reasons}
        self.request_log.end(
            status=status,
            finish_reason=",".join(sorted(reasons)),
            usage=None if self.request_log.before_first_token else self.renderer.usage,
            error=error,
        )
