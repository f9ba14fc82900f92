"""The session of one generation: from the feeds of its members through the renderer to one client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from api.asgi.off_loop import off_loop
from api.chat.piece import Piece
from api.errors.errors import CLIENT_LEFT, CLIENT_LEFT_TEXT, ClientDisconnected, StreamInterrupted
from api.follow.follow import Feeds
from api.generation.caller import Caller
from api.rendering.chunks import StreamRenderer
from api.schemas.view import View
from api.settings import ApiSettings
from control.clock import now_ms
from control.messages import LogEntry, encode
from control.requests.upkeep.orphans import GRACE_MS

ENTRY_BYTES = 20
"""Of an entry of the log in JSON without log probabilities, about."""
TURN_ENTRIES, TURN_SCORED, TURN_PROMPTS = 1024, 64, 1
"""Entries of the log that one turn of the event loop renders: some milliseconds. With twenty log probabilities an entry
costs thirty times as much, and one of a prompt has many tokens."""


def log_bytes(entries: int, renderer: StreamRenderer) -> int:
    """About the size of the token log of an answer in JSON."""
    return ENTRY_BYTES * entries + renderer.body_bytes


def _turn_of(view: View) -> int:
    if view.prompt_logprobs is not None or (view.echo and view.logprobs is not None):
        return TURN_PROMPTS
    return TURN_ENTRIES if view.logprobs is None else TURN_SCORED


@dataclass(eq=False, kw_only=True)
class Session:
    """One client that follows one answer. `release` must be called once the client has all of it, or has left."""

    feeds: Feeds
    renderer: StreamRenderer
    caller: Caller
    settings: ApiSettings
    interrupted: Callable[[], bool]
    """Returns True once this process is about to end."""
    complete: Callable[[bytes, bytes], Awaitable[object]]
    """Completes the stored response; takes its body, and the token log of a chat."""
    settle_limits: Callable[[], None] | None = None
    """Has the API key's limits settled soon after the end; None where it has none."""
    _released: bool = field(default=False, init=False)

    @property
    def rid(self) -> str:
        return self.feeds.rid

    def take(self) -> Iterator[tuple[int, list[LogEntry]]]:
        """Entries of each member for one turn of the event loop."""
        return self.feeds.take(_turn_of(self.renderer.view))

    async def settle(self) -> None:
        """Wait for the claim, the first token or an early refusal, so that the status line can be honest.

        Raises ClientDisconnected.
        """
        feeds, request_log, until = self.feeds, self.caller.request_log, self.settings.early_refusal
        with self.caller.client.watched(self.client_left):
            while not feeds.started and request_log.waited < until and not self.interrupted():
                self.check_present()
                feeds.wake.clear()
                await feeds.wait(until - request_log.waited)
        self.check_present()
        feeds.wake.set()

    def early_failure(self) -> Exception | None:
        """The error of a request that ended before its first token, while the status line is still open."""
        for member, feed in enumerate(self.feeds.members):
            if feed.error is not None and feed.have == 0:
                return feed.error
            if feed.ended_without_token:
                self.renderer.feed(member, feed.take())
        return self.renderer.failure

    async def collect(self) -> list[Piece]:
        """All choices' text, once all have ended. Raises the feeds' errors and ClientDisconnected."""
        feeds, renderer, request_log = self.feeds, self.renderer, self.caller.request_log
        pieces = renderer.empty_pieces()
        while not renderer.finished:
            feeds.wake.clear()
            self.check_interrupted()
            progress = False
            for member, entries in self.take():
                renderer.collect(pieces, member, entries)
                progress = True
            if progress:
                request_log.first_token()
                await feeds.rest()
                continue
            feeds.check()
            self.check_present()
            await feeds.wake.wait()
        return pieces

    async def store(self) -> None:
        """Complete the stored response, if there is one, before the client is told that it has ended."""
        if not self.renderer.view.extra_fields:
            return
        if (body := await off_loop(self.renderer.body_bytes, lambda: self.renderer.to_store)) is not None:
            await self.complete(body, await self._log())

    async def _log(self) -> bytes:
        """The token log of a chat (JSON), by which it can be replayed."""
        if self.renderer.view.endpoint != "chat":
            return b""
        [feed] = self.feeds.members
        return await off_loop(log_bytes(feed.have, self.renderer), lambda: encode(feed.entries[:]))

    def client_left(self) -> None:
        """Called when the client leaves: its request is withdrawn at once, and its reader woken."""
        self.left()
        self.feeds.wake.set()

    def left(self) -> None:
        """The connection is gone before the end: the client closed it, or read nothing, or this process stops."""
        if self.caller.client.stalled:
            text = "cut: the client read nothing"
        else:
            text = "cut by shutdown" if self.interrupted() else CLIENT_LEFT_TEXT
        self.release(status=CLIENT_LEFT, error=text)

    def check_present(self) -> None:
        """Raises ClientDisconnected once the client has left."""
        if self.caller.client.left:
            raise ClientDisconnected

    def check_interrupted(self) -> None:
        """Raises StreamInterrupted, telling where to go on, once this process is about to end."""
        if self.interrupted():
            raise StreamInterrupted(self.rid, self.renderer.place)

    def release(self, *, status: int, error: str | None = None, delivered: bool = False) -> None:
        """Stop following and write the terminal line; later calls do nothing."""
        if self._released:
            return
        self._released = True
        # Where this process cut the client off, the client has not left: it gets time to resume, here or elsewhere.
        grace_ms = GRACE_MS if not delivered and (self.interrupted() or self.caller.client.stalled) else 0
        self.feeds.leave(now_ms() if delivered else None, grace_ms)
        if self.settle_limits is not None:
            self.settle_limits()
        request_log = self.caller.request_log
        reasons = {reason or "disconnected" for answer in self.renderer.answers for reason in answer.finish_reasons}
        request_log.end(
            status=status,
            finish_reason=",".join(sorted(reasons)),
            usage=None if request_log.before_first_token else self.renderer.usage,
            error=error,
        )
