"""An API process survives outages of Redis: one that goes away, hangs, or loses its data."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx

from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat, events, text_of
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

CHAT = "/v1/chat/completions"


def test_lost_events_are_read_from_the_log(api: ApiProcess, leader: ScriptedLeader, redis_client: Any) -> None:
    """With the live channel cut at every step, the stream still is whole."""
    leader.pause()
    with httpx.stream("POST", f"{api.url}{CHAT}", json=chat("hello", stream=True), timeout=40) as response:
        events_read = events(response.iter_lines())
        text = ""
        for _ in range(3):
            redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            leader.step(2)
            before = len(text)
            while len(text) < before + 2:
                text += next(events_read).text
        leader.resume()
        assert text + text_of(events_read) == "you said hello"


def test_redis_goes_away_and_comes_back(tmp_path: Path) -> None:
    """New requests get 503 with Retry-After; an open stream waits, and goes on when Redis is back with its data."""
    with serving(NEW, "appendonly yes", "appendfsync always") as server:
        leader = ScriptedLeader(server.url)
        leader.start()
        with running_api(server.url, tmp_path) as api:
            leader.pause()
            with httpx.stream("POST", f"{api.url}{CHAT}", json=chat("hello", stream=True), timeout=40) as response:
                events_read = events(response.iter_lines())
                leader.step(3)
                text = ""
                while len(text) < 3:
                    text += next(events_read).text
                server.kill()
                refused = httpx.post(f"{api.url}{CHAT}", json=chat("x"), timeout=40)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert httpx.get(f"{api.url}/ready").status_code == 503
                assert httpx.get(f"{api.url}/health").status_code == 200
                server.start()
                leader.resume()
                assert text + text_of(events_read) == "you said hello"
        leader.stop()


def test_a_redis_that_says_nothing_is_refused_for_and_waited_for(tmp_path: Path) -> None:
    """A server that stands still closes no connection: new requests get their 503 all the same, the stream goes on."""
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url)
        leader.start()
        assert server.process is not None
        with running_api(server.url, tmp_path) as api:
            leader.pause()
            with httpx.stream("POST", f"{api.url}{CHAT}", json=chat("hello", stream=True), timeout=30) as response:
                events_read = events(response.iter_lines())
                leader.step(3)
                text = ""
                while len(text) < 3:
                    text += next(events_read).text
                server.process.send_signal(signal.SIGSTOP)
                refused = [httpx.post(f"{api.url}{CHAT}", json=chat("x"), timeout=40) for _ in range(4)]
                server.process.send_signal(signal.SIGCONT)
                assert {(one.status_code, one.headers["retry-after"]) for one in refused} == {(503, "1")}
                leader.resume()
                assert text + text_of(events_read) == "you said hello"
        leader.stop()


def test_an_open_stream_outlives_a_redis_that_lost_everything(tmp_path: Path) -> None:
    """After a total loss an open stream is brought back with what was delivered, and goes on without a seam."""
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url)
        leader.start()
        with running_api(server.url, tmp_path) as api:
            leader.pause()
            body = chat("hello", stream=True, n=2)
            with httpx.stream("POST", f"{api.url}{CHAT}", json=body, timeout=40) as response:
                events_read = events(response.iter_lines())
                leader.step(3)
                before = [next(events_read) for _ in range(2 + 2 * 3)]
                server.kill()
                server.start()
                leader.resume()
                chunks = [event.data for event in [*before, *events_read] if event.data]
                texts = ["", ""]
                for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                assert texts == ["you said hello"] * 2
            assert len(leader.claimed) == 2
            assert leader.claimed[0].params == leader.claimed[1].params
            assert len(leader.claimed[1].log) == 2 * 3
        leader.stop()
