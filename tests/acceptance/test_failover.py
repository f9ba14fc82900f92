"""A farm behind Sentinels, and one on a Cluster: the primary dies with the newest writes, and every stream goes on exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ops.chaos.topologies import cluster, sentinel
from tests.acceptance.streams import Received, open_stream, receive
from tests.acceptance.test_survival import LONG, whole
from tests.farm import Farm, serving_farm, until
from tests.servers import NEW

pytestmark = pytest.mark.timeout(240)

OPTIONS = ("demo", "--tp", "2", "--devices", "cpu", "--dtype", "float64")
BODIES = [LONG | {"messages": [{"role": "user", "content": f"Count from {first} to 100."}]} for first in range(1, 7)]
KEY = "furrow:{demo}:bell"


def stream_through(farm: Farm, strike: Callable[[], None]) -> list[Received]:
    """Every answer, with the strike when all streams are well on their way."""
    streams = [Received() for _ in BODIES]
    far = threading.Barrier(len(BODIES) + 1)

    def follow(number: int) -> Received:
        for now in receive(open_stream(farm.address, BODIES[number]), streams[number]):
            if len(now.ids) == 30:
                far.wait(60)
        return streams[number]

    with ThreadPoolExecutor(len(BODIES)) as pool:
        following = [pool.submit(follow, number) for number in range(len(BODIES))]
        far.wait(60)
        strike()
        return [one.result() for one in following]


def check(farm: Farm, expected: list[Received], lag: Callable[[], None], fail_over: Callable[[], object]) -> None:
    """The streams are those of the undisturbed run, and the primary that died had entries that its successor lacks."""
    kept: dict[str, int] = {}

    def lengths() -> dict[str, int]:
        return {rid: farm.redis.xlen(f"furrow:{{demo}}:log:{rid}") for rid in rids}

    def strike() -> None:
        lag()
        kept.update(lengths())
        until(lambda: any(now > kept[rid] for rid, now in lengths().items()))
        fail_over()

    rids: list[str] = []
    original = farm.redis

    def running() -> Iterator[str]:
        for key in original.xrange("furrow:{demo}:bell"):
            if key[1].get("rid"):
                yield key[1]["rid"]

    def strike_running() -> None:
        rids.extend(dict.fromkeys(running()))
        strike()

    received = stream_through(farm, strike_running)
    assert [one.errors for one in received] == [[] for _ in BODIES]
    assert [one.text for one in received] == [one.text for one in expected]
    assert [one.finish for one in received] == [one.finish for one in expected]
    log = farm.log.read_text()
    assert "gave a token log back" in log, "nothing was rolled back: the fault had no effect"
    until(farm.ready)
    assert whole(farm, LONG).text == expected[0].text
