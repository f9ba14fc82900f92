"""Streams survive a Redis failover: of Sentinels and of a Cluster, where a primary dies with the newest writes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ops.chaos.system.topologies import cluster, sentinel
from tests.acceptance.streams import Received, open_stream, receive
from tests.acceptance.test_survival import LONG, whole
from tests.farm import Farm, serving_farm
from tests.servers import NEW
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

OPTIONS = ("demo", "--tp", "2", "--devices", "cpu", "--dtype", "float64")
BODIES = [LONG | {"messages": [{"role": "user", "content": f"Count from {first} to 100."}]} for first in range(1, 4)]
KEY = "furrow:{demo}:bell"


def check(farm: Farm, lag: Callable[[], None], fail_over: Callable[[], object]) -> None:
    """The streams are those of the undisturbed run, and what they had been given had really been lost."""
    with ThreadPoolExecutor(len(BODIES)) as pool:
        expected = list(pool.map(lambda body: whole(farm, body), BODIES))
    streams = [Received() for _ in BODIES]

    def follow(number: int) -> None:
        for _ in receive(open_stream(farm.address, BODIES[number]), streams[number]):
            pass

    with ThreadPoolExecutor(len(BODIES)) as pool:
        following = [pool.submit(follow, number) for number in range(len(BODIES))]
        until(lambda: all(len(stream.ids) > 10 for stream in streams))
        lag()
        lengths = [len(stream.ids) for stream in streams]
        until(lambda: all(len(stream.ids) > was + 3 for stream, was in zip(streams, lengths, strict=True)))
        fail_over()
        assert all(stream.finish is None for stream in streams), "the streams were over before the primary died"
        for one in following:
            one.result()
    assert [stream.errors for stream in streams] == [[] for _ in BODIES]
    assert [(stream.text, stream.finish) for stream in streams] == [(one.text, one.finish) for one in expected]
    assert all(len(set(stream.ids)) == len(stream.ids) for stream in streams)
    repaired = ("gave a token log back", "token log lost its end")  # by the API, by the leader
    assert any(words in farm.log.read_text() for words in repaired), "nothing had been lost: the fault had no effect"
    until(farm.ready)
    assert whole(farm, LONG).text == expected[0].text


def test_streams_outlive_a_sentinel_failover_to_a_replica_that_lags() -> None:
    """The replica lacks entries that clients have; it is promoted, repaired, and the answers are exact."""
    with sentinel(binary=NEW) as servers, serving_farm(*OPTIONS, redis_url=servers.url, FURROW_STANDBY="0") as farm:
        check(farm, servers.lag, servers.fail_over)


def test_streams_outlive_the_failover_of_a_cluster_s_shard() -> None:
    """The same for the shard of a Cluster that holds the model."""
    with (
        cluster(replicas=1, binary=NEW) as servers,
        serving_farm(*OPTIONS, redis_url=servers.url, FURROW_STANDBY="0") as farm,
    ):
        check(farm, lambda: servers.lag(KEY), lambda: servers.fail_over(KEY))
