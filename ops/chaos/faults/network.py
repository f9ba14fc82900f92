"""Faults of the connection to Redis: cut, late, silent, lost answers. The lossy proxy causes them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from control.errors import RedisUnavailable
from control.redis.clients import connect
from control.redis.connection import read, run
from ops.chaos.errors import NoEffect
from ops.chaos.faults.fault import Fault, harmless, outage_s
from ops.chaos.system.proxy import Proxy
from ops.chaos.system.target import Target

MET_WITHIN_S = 20.0
"""Limit until enough answers are due; an idle farm sends some commands too."""
DELAYED_S = (1.0, 4.0)
"""Shortest and longest time for which bytes are delayed."""
LONGEST_DELAY_S = 0.3
"""Each way. Much more would let a lock of two seconds lapse."""


def through_proxy(strike: Callable[[Target, Proxy, random.Random], str]) -> Fault:
    """The proxy, restored after the strike. Raises NoEffect if the farm does not use it."""

    def led(target: Target, random: random.Random) -> str:
        if target.proxy is None:
            raise NoEffect("this farm does not reach Redis through the lossy proxy")
        try:
            return strike(target, target.proxy, random)
        finally:
            target.proxy.heal()

    return harmless(led)


def some(random: random.Random, share: float) -> Callable[[], bool]:
    """A choice that takes the first, and about `share` of the others."""
    chances = itertools.chain([0.0], iter(random.random, None))
    return lambda: next(chances) < share


def cut_connections(target: Target, proxy: Proxy, random: random.Random) -> str:
    """Reset many connections at once, several times in a row."""
    cut = 0
    for _ in range(random.randint(1, 6)):
        cut += proxy.cut(some(random, random.choice((0.3, 1.0))))
        target.rest(random.uniform(0.01, 0.5))
    if not cut:
        raise NoEffect("no connection was open")
    return f"{cut} connections reset"


def drop_replies(target: Target, proxy: Proxy, random: random.Random) -> str:
    """Lose the answers of executed scripts."""
    times = random.randint(3, 30)
    ending = random.choice(("cut", "cut", "silence"))
    if ending == "silence":
        times = min(times, 5)  # each costs a time-out
    before = proxy.counts.dropped
    proxy.drop_replies(times, ending)
    target.proved(lambda: proxy.counts.dropped >= before + times, f"{times} answers are dropped", MET_WITHIN_S)
    return f"{times} answers of executed scripts dropped ({ending})"


def split_reply(target: Target, proxy: Proxy, random: random.Random) -> str:
    """Cut answers in the middle."""
    times = random.randint(1, 20)
    before = proxy.counts.split
    proxy.split_replies(times)
    target.proved(lambda: proxy.counts.split >= before + times, f"{times} answers end in the middle", MET_WITHIN_S)
    return f"{times} answers ended in the middle"


def delay(target: Target, proxy: Proxy, random: random.Random) -> str:
    """Delay all bytes, both ways."""
    seconds = random.uniform(0.02, LONGEST_DELAY_S)
    before = proxy.counts.delayed
    proxy.delay(seconds)
    took = ping_s(proxy)
    target.rest(random.uniform(*DELAYED_S))
    late = proxy.counts.delayed - before
    if took < 2 * seconds or not late:
        raise NoEffect(f"an answer took {took:.3f} s with a delay of {seconds:.3f} s each way")
    return f"{late} chunks late by {1000 * seconds:.0f} ms; an answer took {1000 * took:.0f} ms"


def ping_s(proxy: Proxy) -> float:
    """Seconds of a connection and a round trip over the proxy."""
    with connect(proxy.url) as client:
        began = time.monotonic()
        run(client, read("PING", parse=bool))
        return time.monotonic() - began


def black_hole(target: Target, proxy: Proxy, random: random.Random) -> str:
    """Drop all bytes silently; connections that are open then never carry a byte again."""
    seconds = outage_s(random)
    before = proxy.counts.swallowed
    open_then = proxy.black_hole()
    target.rest(seconds)
    if not silent(proxy):
        raise NoEffect("an answer came through the black hole")
    proxy.heal()
    swallowed = proxy.counts.swallowed - before
    if not open_then or not swallowed:
        raise NoEffect(f"{open_then} connections were open, {swallowed} bytes vanished")
    return f"{open_then} connections and {swallowed} bytes vanished in {seconds:g} s"


def silent(proxy: Proxy) -> bool:
    try:
        ping_s(proxy)
    except RedisUnavailable:
        return True
    return False


def half_open(target: Target, proxy: Proxy, random: random.Random) -> str:
    """Silence some connections for good; new ones work."""

    def noticed() -> int:
        # A client whose command had been forwarded sends nothing more: it closes the connection at its time-out.
        return proxy.counts.swallowed + proxy.counts.abandoned

    before = noticed()
    lost = proxy.black_hole(some(random, random.choice((0.2, 0.5, 1.0))), newcomers=False)
    target.proved(
        lambda: noticed() > before, f"a client sends on or closes one of {lost} silent connections", MET_WITHIN_S
    )
    return f"{lost} connections lead nowhere"


FAULTS: dict[str, Fault] = {
    "cut-connections": through_proxy(cut_connections),
    "drop-replies": through_proxy(drop_replies),
    "split-reply": through_proxy(split_reply),
    "delay": through_proxy(delay),
    "black-hole": through_proxy(black_hole),
    "half-open": through_proxy(half_open),
}
