"""Running calls on Redis, from threads and from asyncio: one description of each transition, two ways to send it.

A `Call` is data: the words to send and the parser of the reply. Every script may be sent twice, so a call without a
reply is sent again; redis-py's own retries are off. A server is RedisUnavailable while it can't be reached, can't write
(loading, out of memory, a failed save, a replica), denies a right, or has a key that another program has written over:
the caller keeps its data and tries later. After a time-out no idle connection is used again.

`run` and its kin send calls at once, `Posted` in two halves. `Batches` sends the calls of many coroutines on few
connections: the calls that come while a round trip is under way share the next one. A connection for each coroutine
would be slow to make, and a pool of them is soon used up. `read_streams` blocks until a stream has an entry.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from redis import exceptions as redis_errors
from redis.client import NEVER_DECODE

from control.errors import ArgumentsRefused, FurrowError, KeyDamaged, RedisDenied, RedisFull, RedisUnavailable
from control.redis.clients import LONGEST_BLOCK_MS, AsyncRedis, SyncRedis, unavailable
from control.redis.clients import connect as connect
from control.redis.clients import connect_async as connect_async
from control.redis.clients import connect_blocking as connect_blocking
from control.redis.cluster import AsyncCluster, Cluster, Routed
from control.redis.pipeline import ABSENT, Pipeline, RedisCommand, exchange
from control.scripts import SCRIPTS, refused

T = TypeVar("T")
Entry = tuple[str, dict[str, str]]
RETRY_AFTER_S = (0.02, 0.1, 0.4)
"""Waits before the second, third and fourth sending. Longer outages are the caller's to sit out."""
GIVE_UP_S = 1.5
"""No further sending after so long: where each ends with a time-out, two are enough."""
BREATH_S = 0.1
"""Pause before a failed read is reported, so that a loop around it does not spin while Redis is away."""
LARGEST_BATCH = 128
"""Calls in one round trip; each is a script of a fraction of a millisecond, and the first waits for the last."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One transition (a script) or one plain read, as data. `parse` may raise a FurrowError."""

    script: str
    """Name of the script, or "" for a plain command, whose words are `args`."""
    keys: tuple[str, ...]
    args: tuple[Any, ...]
    parse: Callable[[Any], T]
    binary: bool = False
    """The reply is bytes, in every client; else text."""

    def words(self, *, by_sha: bool) -> list[Any]:
        if not self.script:
            return list(self.args)
        script = SCRIPTS[self.script]
        head = ["EVALSHA", script.sha] if by_sha else ["EVAL", script.text]
        return [*head, len(self.keys), *self.keys, *self.args]

    def command(self, *, by_sha: bool) -> RedisCommand:
        return RedisCommand(tuple(self.words(by_sha=by_sha)), {NEVER_DECODE: True} if self.binary else {})


def read(*words: Any, parse: Callable[[Any], T]) -> Call[T]:
    """A plain command as a Call: only for reads and for writes that may be repeated."""
    return Call("", (), words, parse)


def read_bytes(*words: Any, parse: Callable[[Any], T]) -> Call[T]:
    """As `read`, of values that are bytes and no text."""
    return Call("", (), words, parse, binary=True)


def optional_text(reply: str | None) -> str | None:
    """The parser of a value that may be absent."""
    return reply


def write(command: str, key: str, *words: Any, parse: Callable[[Any], T]) -> Call[T]:
    """A plain write as a Call that a server beyond its maxmemory takes too; `command` is one that `write.lua` knows."""
    return Call("write", (key,), (command, *words), parse)


def run(client: SyncRedis, call: Call[T]) -> T:
    """Run one call; raises what its parse raises, or RedisUnavailable."""
    return _value(run_all(client, [call])[0])


def run_all(client: SyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """Run the calls in one pipelined round trip; an error of one call stands in its place and spares the others.

    Raises RedisUnavailable when none of them could be sent after a few quick retries. Where only some could, because
    one shard of a Cluster is away, it stands in the place of the others.
    """
    return Posted(client, calls).outcomes()


def run_every(client: SyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """As `run_all`, but raises the first error among the answers."""
    return Posted(client, calls).values() if calls else []


Step = Call[Any] | Sequence[Call[Any]] | None
Steps = Generator[Step, Any, T]
"""Calls of which each depends on the answers before it, written once for threads and for asyncio. It yields one call,
or several for one round trip, and receives their value or values. Where it yields None it has worked for a while
without a call, and others may have their turn."""


def run_steps(client: SyncRedis, steps: Steps[T]) -> T:
    """Run them one after the other; raises what one of the calls raises."""
    try:
        step = next(steps)
        while True:
            step = steps.send(_answers(step, run_every(client, _calls(step))))
    except StopIteration as end:
        return end.value


async def arun_steps(client: AsyncRedis, steps: Steps[T]) -> T:
    """As `run_steps`, on an asyncio client; the event loop is left to others between two of them."""
    try:
        step = next(steps)
        while True:
            await asyncio.sleep(0)
            step = steps.send(_answers(step, await arun_every(client, _calls(step))))
    except StopIteration as end:
        return end.value


def _calls(step: Step) -> Sequence[Call[Any]]:
    if step is None:
        return ()
    return [step] if isinstance(step, Call) else step


def _answers(step: Step, values: list[Any]) -> Any:
    """The value that the generator receives for a step: one answer, or a list of them."""
    return values[0] if isinstance(step, Call) else values


class Posted:
    """Calls that are sent when this is made; the caller works on until it needs their answers.

    Asked a second time, after an error, it sends them all again: every script may come twice.
    """

    def __init__(self, client: SyncRedis, calls: Sequence[Call[Any]]) -> None:
        self._client = client
        self._calls = calls
        self._under_way: Pipeline | Routed[list[Any]] | Exception | None = self._send()

    def _send(self) -> Pipeline | Routed[list[Any]] | Exception:
        self._sending = _Sending(self._calls)
        return _depart(self._client, self._sending.commands())

    def outcomes(self) -> list[Any]:
        """As of `run_all`."""
        under_way = self._under_way or self._send()
        self._under_way = None
        sending = self._sending
        sending.begin()
        sending.take(_arrive(self._client, under_way))
        for wait in (*RETRY_AFTER_S, None):
            while commands := sending.commands():
                sending.take(_arrive(self._client, _depart(self._client, commands)))
            if wait is None or not sending.again():
                break
            time.sleep(wait)
        return sending.outcomes(self._client)

    def drain(self) -> None:
        """Read the answers once and drop them. Where Redis was reachable, the calls have been carried out by then."""
        if self._under_way is not None:
            _arrive(self._client, self._under_way)
            self._under_way = None

    def values(self) -> list[Any]:
        """As of `run_every`."""
        return [_value(outcome) for outcome in self.outcomes()]


async def arun(client: AsyncRedis, call: Call[T]) -> T:
    """As `run`, on an asyncio client."""
    return _value((await arun_all(client, [call]))[0])


async def arun_all(client: AsyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """As `run_all`, on an asyncio client."""
    sending = _Sending(calls)
    for wait in (*RETRY_AFTER_S, None):
        while commands := sending.commands():
            sending.take(await _aexchange(client, commands))
        if wait is None or not sending.again():
            break
        await asyncio.sleep(wait)
    return sending.outcomes(client)


async def arun_every(client: AsyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """As `run_every`, on an asyncio client."""
    return [_value(outcome) for outcome in await arun_all(client, calls)] if calls else []


class _Sending:
    """The calls that are still to be sent, each by the hash of its script or by its text."""

    def __init__(self, calls: Sequence[Call[Any]]) -> None:
        self._calls = calls
        self.begin()
        self._by_sha = dict.fromkeys(range(len(calls)), True)
        self._sent: list[int] = []
        self._failed: list[int] = []
        self._replies: list[Any] = [None] * len(calls)

    def begin(self) -> None:
        """The wait for answers begins."""
        self._began = time.monotonic()

    def commands(self) -> list[RedisCommand]:
        """The commands to send now; none once every call has an answer or has failed."""
        self._sent = list(self._by_sha)
        return [self._calls[i].command(by_sha=by_sha) for i, by_sha in self._by_sha.items()]

    def take(self, replies: list[Any] | Exception) -> None:
        """The replies, or what the whole round trip failed with."""
        each = replies if isinstance(replies, list) else [replies] * len(self._sent)
        again: dict[int, bool] = {}
        for i, reply in zip(self._sent, each, strict=True):
            self._replies[i] = reply
            if isinstance(reply, redis_errors.NoScriptError) and self._by_sha[i]:
                again[i] = False  # a new or flushed server: send the text of just those
            elif isinstance(reply, ABSENT):
                self._failed.append(i)
        self._by_sha = again

    def again(self) -> bool:
        """Put the failed calls up for another try; False where there are none, or none is worth it, or it took long."""
        if time.monotonic() - self._began > GIVE_UP_S:
            return False
        # A wrong password stays wrong.
        hopeless = redis_errors.AuthenticationError
        self._by_sha = {i: True for i in self._failed if not isinstance(self._replies[i], hopeless)}
        self._failed = []
        return bool(self._by_sha)

    def outcomes(self, client: SyncRedis | AsyncRedis) -> list[Any]:
        away = [reply for reply in self._replies if isinstance(reply, ABSENT)]
        if away and len(away) == len(self._replies):
            raise unavailable(client, away[0]) from away[0]
        return [
            unavailable(client, reply) if isinstance(reply, ABSENT) else _outcome(call, reply)
            for call, reply in zip(self._calls, self._replies, strict=True)
        ]


def _depart(client: SyncRedis, commands: Sequence[RedisCommand]) -> Pipeline | Routed[list[Any]] | Exception:
    """The first half of a pipelined round trip; the exception that it failed with is its result."""
    try:
        return client.depart(commands) if isinstance(client, Cluster) else Pipeline(client, commands)
    except ABSENT as error:
        drop_idle(client, error)
        return error


def _arrive(client: SyncRedis, departed: Pipeline | Routed[list[Any]] | Exception) -> list[Any] | Exception:
    """The second half: the replies, or the exception that it failed with."""
    if isinstance(departed, Exception):
        return departed
    try:
        return departed.replies()
    except ABSENT as error:
        drop_idle(client, error)
        return error


async def _aexchange(client: AsyncRedis, commands: Sequence[RedisCommand]) -> list[Any] | Exception:
    """One pipelined round trip; the exception that it failed with is its result."""
    try:
        return await (client.exchange(commands) if isinstance(client, AsyncCluster) else exchange(client, commands))
    except ABSENT as error:
        await adrop_idle(client, error)
        return error


def _value(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _outcome(call: Call[Any], reply: Any) -> Any:
    """The parsed answer, or the exception for the reply."""
    if isinstance(reply, Exception):
        if (reason := refusal(reply, call.script or call.args[0])) is not None:
            return reason
        if call.script and (why := refused(str(reply))) is not None:
            damaged = _DAMAGED.fullmatch(why)
            return KeyDamaged(*damaged.groups()) if damaged else ArgumentsRefused(call.script, why)
        if not call.script and wrong_type(reply):
            return KeyDamaged(str(call.args[1]), f"is of a type that {call.args[0]} can't read")
        return reply
    try:
        return call.parse(reply)
    except FurrowError as error:
        return error


_DAMAGED = re.compile(r'key "(.*)" (is not .* but .*)', re.DOTALL)
"""A refusal of a script (`scripts/_check.lua`) for the sake of a key."""
_TYPES = (
    redis_errors.BusyLoadingError,
    redis_errors.OutOfMemoryError,
    redis_errors.ReadOnlyError,
    redis_errors.MasterDownError,
    redis_errors.ClusterDownError,
    redis_errors.TryAgainError,
    redis_errors.AskError,
)
"""Errors that redis-py reports by type; it removes the first word from their text."""
_TEXT = re.compile(
    # At the beginning, or behind the dash that Redis 6.2 puts before an error inside a script.
    r"(?:^|-)(?:LOADING|OOM|MISCONF|READONLY|BUSY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|UNBLOCKED) "
    # While a slot moves between shards, a script finds some of its keys gone already.
    r"|attempted to access a non local key|while the cluster is down"
)
_DENIED = re.compile(
    # In a script too, whose words differ between Redis 6.2, Redis 7 and Valkey.
    r"(?:^|-)NOPERM |no permission|user executing the script can't|ACL failure",
    re.IGNORECASE,
)
_FULL = re.compile(r"(?:^|-)OOM ")


def refusal(error: Exception, command: str) -> RedisUnavailable | None:
    """The error for a refusal of `command` that the caller can wait out or an operator can mend; None for another."""
    if out_of_memory(error):
        return RedisFull()
    if lacks_right(error):
        return RedisDenied(str(error))
    if transient(error):
        return RedisUnavailable(f"Redis can't serve {command} just now: {error}")
    return None


def transient(error: Exception) -> bool:
    """True if the same command may succeed later, by itself or after the operator repaired the server."""
    return isinstance(error, _TYPES) or _TEXT.search(str(error)) is not None


def out_of_memory(error: Exception) -> bool:
    """True if the server refused a write because it has reached its maxmemory."""
    return isinstance(error, redis_errors.OutOfMemoryError) or _FULL.search(str(error)) is not None


def wrong_type(error: Exception) -> bool:
    """True if a key has another type than the command is for."""
    return "WRONGTYPE " in str(error)


def lacks_right(error: Exception) -> bool:
    """True if the server's user lacks a right to the command, a key or a channel."""
    return isinstance(error, redis_errors.NoPermissionError) or _DENIED.search(str(error)) is not None


class _SaysSo:
    """Mixed into an asyncio connection: a transport that is closed already counts as a broken connection.

    uvloop raises RuntimeError where asyncio's own transports drop what is written.
    """

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*args, **options)  # type: ignore[misc]
        except RuntimeError as error:
            raise redis_errors.ConnectionError(f"the connection is closed: {error}") from error


def hardened(client: AsyncRedis) -> AsyncRedis:
    """`client`, with connections that say when they are closed."""
    if not isinstance(client, AsyncCluster):
        pool = client.connection_pool
        plain = pool.connection_class
        pool.connection_class = type(plain.__name__, (_SaysSo, plain), {})
    return client


def drop_idle(client: SyncRedis, error: Exception) -> None:
    """After a time-out the idle connections are as suspect as the one that met it; each would cost another."""
    if isinstance(error, redis_errors.TimeoutError) and not isinstance(client, Cluster):
        client.connection_pool.disconnect(inuse_connections=False)


async def adrop_idle(client: AsyncRedis, error: Exception) -> None:
    """As `drop_idle`."""
    if isinstance(error, redis_errors.TimeoutError) and not isinstance(client, AsyncCluster):
        await client.connection_pool.disconnect(inuse_connections=False)


def read_streams(client: SyncRedis, after: dict[str, str], block_ms: int) -> dict[str, list[Entry]]:
    """Entries after the given ids, waiting up to `block_ms` for the first; an empty dict when none came.

    Use a blocking client. Raises RedisUnavailable.
    """
    try:
        reply: Any = client.xread({**after}, block=max(1, min(block_ms, LONGEST_BLOCK_MS)))
    except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
        time.sleep(BREATH_S)
        raise unavailable(client, error) from error
    except redis_errors.ResponseError as error:
        reason = KeyDamaged(" or ".join(after), "is not a stream") if wrong_type(error) else refusal(error, "XREAD")
        if reason is None:
            raise
        time.sleep(BREATH_S)
        raise reason from error
    return cast(dict[str, list[Entry]], dict(reply or ()))


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    call: Call[Any]
    answer: asyncio.Future[Any]
    check: Callable[[], object] | None = None


class Batches:
    """Runs calls in the order in which they come, by lane: one for each model, whose shard may be away alone."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._waiting: dict[str, deque[_Waiting]] = defaultdict(deque)
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def run(self, lane: str, call: Call[T], check: Callable[[], object] | None = None) -> T:
        """Run one call; raises what its parse raises, or RedisUnavailable. Cancelled before it was sent, it is not.

        `check` runs just before the call is sent; what it raises is raised here, and the call is not sent.
        """
        return await self._queue(lane, call, check)

    async def run_all(self, lane: str, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run the calls; an error of one, RedisUnavailable too, stands in its place."""
        return await asyncio.gather(*(self._queue(lane, call) for call in calls), return_exceptions=True)

    async def run_every(self, lane: str, calls: Sequence[Call[Any]]) -> list[Any]:
        """As `run_all`, but raises the first error."""
        return await asyncio.gather(*(self._queue(lane, call) for call in calls))

    def _queue(self, lane: str, call: Call[Any], check: Callable[[], object] | None = None) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(_Waiting(call, answer, check))
        if lane not in self._sending:
            self._sending[lane] = asyncio.create_task(self._send(lane))
        return answer

    async def _send(self, lane: str) -> None:
        """Round trips until nothing waits."""
        waiting = self._waiting[lane]
        try:
            while batch := self._next(waiting):
                await self._exchange(batch)
        finally:
            del self._sending[lane], self._waiting[lane]
            for one in waiting:
                one.answer.cancel()

    def _next(self, waiting: deque[_Waiting]) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while waiting and len(batch) < LARGEST_BATCH:
            one = waiting.popleft()
            if one.answer.done():  # nobody waits any more
                continue
            try:
                if one.check is not None:
                    one.check()
                batch.append(one)
            except Exception as error:
                one.answer.set_exception(error)
        return batch

    async def _exchange(self, batch: list[_Waiting]) -> None:
        outcomes: list[Any]
        try:
            outcomes = await arun_all(self._client, [one.call for one in batch])
        except asyncio.CancelledError:
            for one in batch:
                one.answer.cancel()
            raise
        except Exception as error:
            outcomes = [error] * len(batch)
        for one, outcome in zip(batch, outcomes, strict=True):
            if one.answer.done():
                continue
            if isinstance(outcome, Exception):
                one.answer.set_exception(outcome)
            else:
                one.answer.set_result(outcome)
