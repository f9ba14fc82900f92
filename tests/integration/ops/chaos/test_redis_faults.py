"""Each fault of Redis proves its effect: on a private server, and ends with the strike."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import redis

from control import access
from control.errors import RedisUnavailable
from control.messages import ModelSpec
from control.redis.connection import connect, run
from control.replicas.health import Beat, beat
from ops.chaos.errors import NoEffect
from ops.chaos.faults import fault, network, servers
from ops.chaos.system.proxy import Proxy
from ops.chaos.system.servers import ServerProcess
from ops.chaos.system.target import Target
from ops.local.supervisor import Supervisor

pytestmark = pytest.mark.timeout(180)

FAULTS = {**servers.FAULTS, **network.FAULTS}
WORD = Beat(epoch=1, seq=0, oldest_pending_ms=0, device="cpu", memory_bytes=0, phase="ready", pid=1, host="h")


class Writer:
    """Stands for a farm: runs a script of what goes on and one of what is new, however often it is refused."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._key, _ = access.mint()
        self.written = 0

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            try:
                run(self._client, beat("m", "r0", 0, WORD))
                run(self._client, access.spend(self._key, rid := f"r{self.written}", "m", {rid: 1}))
                self.written += 1
            except RedisUnavailable:
                pass


@pytest.fixture(autouse=True)
def short_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault, "OUTAGES_S", (0.3,))
    monkeypatch.setattr(fault, "WEIGHTS", (1,))
    monkeypatch.setattr(network, "DELAYED_S", (0.5, 0.5))
    monkeypatch.setattr(servers, "LOADING_S", (0.8, 0.8))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("struck")
    server = ServerProcess(folder / "data")
    server.start()
    proxy = Proxy(("127.0.0.1", server.port))
    proxy.start()
    spec = ModelSpec(name="m", source="none", tp=1)
    yield Target(spec, server, server.direct, proxy.url, Supervisor({}, print), folder / "log", proxy)
    proxy.stop()
    server.stop()


@pytest.mark.parametrize("kind", FAULTS)
def test_it_takes_effect_says_how_and_is_over(target: Target, kind: str) -> None:
    """The proof is a sentence; afterwards whoever was struck writes again."""
    with Writer(target.redis_url) as writer:
        target.until(lambda: writer.written, "it writes")
        assert FAULTS[kind](target, random.Random(1))
        before = writer.written
        assert target.until(lambda: writer.written > before + 3, "it writes again")


@pytest.mark.parametrize("kind", ["redis-oom", "drop-replies"])
def test_a_fault_that_meets_nobody_is_no_strike(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without anybody who writes there is nothing to prove."""
    monkeypatch.setattr(network, "MET_WITHIN_S", 0.2)
    monkeypatch.setattr(servers, "REFUSED_WITHIN_S", 0.2)
    with pytest.raises(NoEffect):
        FAULTS[kind](target, random.Random(1))
    with redis.Redis.from_url(target.server.url) as client:
        assert client.set("k", "v")
