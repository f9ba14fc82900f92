"""Faults of Redis: one server killed, emptied, stopped, full, unable to save, loading, read-only; or a primary killed,
whose replica takes over and may lag."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from control.errors import RedisUnavailable
from control.redis.connection import transient
from ops.chaos.errors import ChaosError, NoEffect
from ops.chaos.faults.fault import Fault, harmless, outage_s
from ops.chaos.system.servers import ServerProcess
from ops.chaos.system.target import Target
from ops.common.waiting import NotInTime

MARK = "chaos:mark"
"""A key of this run, which shows if the data survived."""
PATIENCE_S = 60.0
REFUSED_WITHIN_S = 20.0
LOADING_S = (1.5, 3.0)
BALLAST = 16_384
"""Extra entries in the append-only file: a loading server answers once per thousand."""
NOWHERE = ("127.0.0.1", "1")
"""A port without a server."""


def server_of(target: Target) -> ServerProcess:
    """Raises NoEffect if the farm's Redis is more than one server."""
    if not isinstance(target.server, ServerProcess):
        raise NoEffect("this farm's Redis is more than one server; use the kinds of failover")
    return target.server


@contextmanager
def operator(target: Target) -> Generator[redis.Redis]:
    """A direct client without time-out and retries."""
    retry = Retry(NoBackoff(), 0)
    with redis.Redis.from_url(
        target.server.url, socket_timeout=PATIENCE_S, retry=retry, decode_responses=True
    ) as client:
        yield client


def kill(target: Target, random: random.Random) -> str:
    """SIGKILL; later a restart on the append-only file."""
    server = server_of(target)
    away = outage_s(random)
    before = server.run_id()
    with operator(target) as client:
        client.set(MARK, before)
    server.kill()
    target.rest(away)
    server.start()
    with operator(target) as client:
        mark = client.get(MARK)
        persistent = client.info("persistence")["aof_enabled"]
        if server.run_id() == before or not persistent:
            raise NoEffect(f"run id {before} -> {server.run_id()}, append-only file: {persistent}")
    # Under appendfsync everysec a slow disk holds acknowledged writes back, and a killed server has lost them.
    newest = "" if mark == before else " but for the newest writes"
    return f"run id {before[:8]} -> {server.run_id()[:8]}, away for {away:g} s, its data kept{newest}"


def kill_bare(target: Target, random: random.Random) -> str:
    """SIGKILL; later a restart without data."""
    server = server_of(target)
    away = outage_s(random)
    before = server.run_id()
    with operator(target) as client:
        client.set(MARK, before)
    server.kill()
    server.lose_everything()
    target.rest(away)
    server.start()
    with operator(target) as client:
        if server.run_id() == before or client.exists(MARK):
            raise NoEffect(f"run id {before} -> {server.run_id()}, mark {client.get(MARK)!r}")
    return f"run id {before[:8]} -> {server.run_id()[:8]}, away for {away:g} s, everything lost"


def flush(target: Target, random: random.Random) -> str:
    """FLUSHALL, and SCRIPT FLUSH."""
    with operator(target) as client:
        client.set(MARK, "1")
        keys = client.dbsize()
        pipeline = client.pipeline(transaction=True)
        pipeline.flushall()
        pipeline.script_flush()
        pipeline.execute()
        if client.exists(MARK):
            raise NoEffect("a key survived FLUSHALL")
    return f"{keys} keys and every script lost"


def sleep(target: Target, random: random.Random) -> str:
    """Stop the server by a signal, or by one long command."""
    seconds = outage_s(random)
    server = server_of(target)
    if random.random() < 0.5:
        with operator(target) as client:
            began = time.monotonic()
            try:
                client.execute_command("DEBUG", "SLEEP", seconds)
            except redis.ResponseError as error:
                raise NoEffect(f"DEBUG SLEEP is refused: {error}") from error
            return f"DEBUG SLEEP took {time.monotonic() - began:.1f} s"
    server.signal(signal.SIGSTOP)
    try:
        target.rest(seconds)
        status = psutil.Process(server.pid).status()
        if status != psutil.STATUS_STOPPED or server.answers():
            raise NoEffect(f"the server's process is {status}")
    finally:
        server.signal(signal.SIGCONT)
    return f"pid {server.pid} stopped for {seconds:g} s"


def pause(target: Target, random: random.Random) -> str:
    """CLIENT PAUSE: every command waits."""
    seconds = outage_s(random)
    with operator(target) as client:
        client.execute_command("CLIENT", "PAUSE", int(seconds * 1000), "ALL")
        began = time.monotonic()
        target.rest(seconds / 2)
    with operator(target) as probe:
        probe.ping()
    took = time.monotonic() - began
    if took < 0.9 * seconds:
        raise NoEffect(f"a command was answered {took:.2f} s after a pause of {seconds:g} s had begun")
    return f"a command waited until {took:.1f} s after the pause began"


# --- answers, but refuses ---------------------------------------------------------------------------------------------


@contextmanager
def refusing(target: Target, word: str, random: random.Random) -> Generator[Callable[[], str]]:
    """Yield a wait for the proof: refused writes with `word`, of this run and of the farm's processes."""
    with operator(target) as client:
        before = refusals(client, word)

        def proof() -> str:
            target.rest(outage_s(random))
            try:
                client.set(MARK, "1")
            except redis.RedisError as error:
                if not transient(error):
                    raise NoEffect(f"a write was refused for another reason: {error}") from error
            else:
                raise NoEffect("a write was accepted")
            event = f"the farm's writes are refused with {word}"
            target.proved(lambda: refusals(client, word) > before + 1, event, REFUSED_WITHIN_S)
            return f"{refusals(client, word) - before} commands refused with {word}"

        yield proof


def refusals(client: redis.Redis, word: str) -> int:
    """The count of commands refused with this word; before 7.0 those inside scripts count as plain errors."""
    stats = client.info("errorstats")
    old = str(client.info("server")["redis_version"]).startswith("6.")
    return sum(int(stats.get(f"errorstat_{name}", {}).get("count", 0)) for name in ((word, "ERR") if old else (word,)))


def out_of_memory(target: Target, random: random.Random) -> str:
    """Set maxmemory below the used memory, without eviction: writes that could grow are refused."""
    with operator(target) as client, refusing(target, "OOM", random) as proof:
        client.config_set("maxmemory", "1")
        try:
            return proof()
        finally:
            client.config_set("maxmemory", "0")


def cannot_save(target: Target, random: random.Random) -> str:
    """A snapshot fails (its file can't be put in its place), so the server refuses every write."""
    with operator(target) as client, refusing(target, "MISCONF", random) as proof:
        obstacle = server_of(target).folder / str(client.config_get("dbfilename")["dbfilename"])
        obstacle.unlink(missing_ok=True)
        obstacle.mkdir()
        try:
            client.config_set("save", "3600 1")
            client.bgsave()
            target.until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "the save fails")
            return proof()
        finally:
            client.config_set("save", "")
            obstacle.rmdir()


def loading(target: Target, random: random.Random) -> str:
    """SIGKILL; then a slow load of the append-only file, with LOADING as answer."""
    server = server_of(target)
    seconds = random.uniform(*LOADING_S)
    with operator(target) as client:
        client.set(MARK, 0)
        client.bgrewriteaof()  # so that what will be loaded is known: the keys, and what comes after them
        target.until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "the file is rewritten")
        pipeline = client.pipeline(transaction=False)
        for _ in range(BALLAST):
            pipeline.incr(MARK)
        pipeline.execute()
        entries = int(client.dbsize()) + BALLAST
    before = server.run_id()
    server.kill()
    server.launch(f"key-load-delay {int(1e6 * seconds / entries)}")
    refused = 0
    deadline = time.monotonic() + PATIENCE_S
    with operator(target) as client:
        while True:
            try:
                client.ping()
                break
            except redis.BusyLoadingError:
                refused += 1
            except (redis.ConnectionError, redis.TimeoutError):
                pass
            if time.monotonic() > deadline:
                raise ChaosError(f"the server did not load its data within {PATIENCE_S:.0f} s")
            target.rest(0.02)
        client.config_set("key-load-delay", 0)
    if not refused or server.run_id() == before:
        raise NoEffect(f"{refused} commands were answered with LOADING")
    return f"run id {before[:8]} -> {server.run_id()[:8]}, {refused} of our commands answered with LOADING"


def read_only(target: Target, random: random.Random) -> str:
    """Make it the replica of a missing server, as a failed failover does, and a primary again."""
    with operator(target) as client, refusing(target, "READONLY", random) as proof:
        client.execute_command("REPLICAOF", *NOWHERE)
        try:
            return proof()
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")


def wilful(fault: Callable[[Target, random.Random], str]) -> Fault:
    """Turn a server's refusal of the fault itself into NoEffect."""

    def strike(target: Target, random: random.Random) -> str:
        server_of(target)
        try:
            return fault(target, random)
        except (redis.RedisError, RedisUnavailable) as error:
            raise NoEffect(f"the server did not do what was asked: {error}") from error

    return strike


# --- failover ---------------------------------------------------------------------------------------------------------

LAG_S = (0.1, 0.5)
"""Shortest and longest time for which a lagging replica is cut off from its primary."""


def strike_primary(lags: bool) -> Fault:
    """Kill the primary; with `lags` its replica has been cut off a moment before."""

    def strike(target: Target, random: random.Random) -> str:
        servers = target.server
        if isinstance(servers, ServerProcess):
            raise NoEffect("one server has nobody who takes over; use --topology sentinel or cluster")
        was = servers.primary_of(target.shard_key)
        if lags:
            servers.lag(target.shard_key)
            target.rest(random.uniform(*LAG_S))
        try:
            now = servers.fail_over(target.shard_key)
        except NotInTime as error:
            raise NoEffect(f"no replica took over from port {was.port}: {error}") from error
        finally:
            servers.heal()
        return f"primary at port {was.port} -> {now.port}{', which lagged' if lags else ''}"

    return strike


FAULTS: dict[str, Fault] = {
    "redis-kill": harmless(wilful(kill)),
    "redis-kill-bare": harmless(wilful(kill_bare)),
    "redis-flush": harmless(wilful(flush)),
    "redis-sleep": harmless(wilful(sleep)),
    "redis-pause": harmless(wilful(pause)),
    "redis-oom": harmless(wilful(out_of_memory)),
    "redis-misconf": harmless(wilful(cannot_save)),
    "redis-loading": harmless(wilful(loading)),
    "redis-readonly": harmless(wilful(read_only)),
}
FAILOVERS: dict[str, Fault] = {"failover": strike_primary(lags=False), "failover-lagging": strike_primary(lags=True)}
"""For a farm whose Redis is replicated."""
