"""A client's request survives the loss of Redis and its API process: another process has it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.generation.client_request import Caller
from api.http.errors import problem
from api.observability import RequestLog
from api.process import Process
from api.schemas.view import StreamCursor
from api.settings import ApiSettings
from control.errors import RequestNotFound
from control.keys import ModelKeys
from control.messages import GenerationRequest
from control.redis.connection import connect
from control.requests import Claimed
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import Event, chat, events, read_all, text_of
from tests.leader import ScriptedLeader
from tests.servers import NEW, Server, serving
from tests.waiting import until

CHAT = "/v1/chat/completions"
KEYS = ModelKeys("tiny")
KEPT = ("params", "tenant", "priority", "on_disconnect", "view", "idempotency", "body_hash", "t_received", "seed")


@dataclass
class TwoProcesses:
    """A farm of its own, because it loses everything; `first` gets the requests, `second` the resumes."""

    server: Server
    leader: ScriptedLeader
    first: ApiProcess
    second: ApiProcess
    client: Any

    def kill_first(self) -> None:
        self.first.process.kill()
        self.first.process.wait()

    def crash(self) -> None:
        """kill -9 of a server that writes nothing down."""
        self.server.kill()
        self.server.start()

    def flush(self) -> None:
        self.client.flushall()


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[TwoProcesses]:
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url)
        leader.start()
        leader.pause()
        with running_api(server.url, tmp_path) as first, running_api(server.url, tmp_path) as second:
            client = connect(server.url)
            yield TwoProcesses(server, leader, first, second, client)
            client.close()
        leader.stop()


def begin(farm: TwoProcesses, body: dict[str, Any], **headers: str) -> list[Event]:
    """The first three characters of a stream of the first process, which then is killed."""
    farm.leader.step(3)
    with httpx.stream("POST", f"{farm.first.url}{CHAT}", json=body, headers=headers, timeout=15) as response:
        text = read_characters(events(response.iter_lines()), 3)
        farm.kill_first()
    return text


def both(claims: list[Claimed]) -> dict[str, GenerationRequest]:
    """The requests that were claimed under each id, once there are two of them."""
    params_by_rid = {claimed.rid: claimed.params for claimed in claims}
    return params_by_rid if len(params_by_rid) == 2 else {}


def read_characters(event_iterator: Iterator[Event], count: int) -> list[Event]:
    read: list[Event] = []
    while len(text_of(read)) < count:
        read.append(next(event for event in event_iterator if not event.comment))
    return read


@pytest.mark.parametrize("lose", [TwoProcesses.crash, TwoProcesses.flush], ids=["killed", "flushed"])
def test_who_resumed_a_stream_brings_it_back(farm: TwoProcesses, lose: Callable[[TwoProcesses], None]) -> None:
    """The request is the one that the dead process enqueued, the log what both delivered; the stream has no seam."""
    body = chat("hello", stream=True, temperature=1, priority="high", on_disconnect=60, timeout=90, user="u")
    key = {"idempotency-key": "k", "authorization": "Bearer me"}
    before = begin(farm, body, **key)
    rid = str(before[-1].id).partition(":")[0]
    headers = {**key, "last-event-id": str(before[-1].id)}
    with httpx.stream("POST", f"{farm.second.url}{CHAT}", json=body, headers=headers, timeout=15) as response:
        rest = events(response.iter_lines())
        farm.leader.step(2)
        between = read_characters(rest, 2)
        was = farm.client.hmget(KEYS.request(rid), KEPT)
        left = int(farm.client.hget(KEYS.request(rid), "deadline"))
        claims = len(farm.leader.claimed)
        lose(farm)
        until(lambda: len(farm.leader.claimed) > claims, 20)
        assert farm.client.hmget(KEYS.request(rid), KEPT) == was
        assert abs(int(farm.client.hget(KEYS.request(rid), "deadline")) - left) < 30_000, "not a day"
        joined = httpx.post(f"{farm.second.url}{CHAT}", json={**body, "stream": False}, headers=key, timeout=15)
        assert joined.status_code == 409, "the key is there again, and means the same body"
        farm.leader.resume()
        assert text_of([*before, *between, *rest]) == "you said hello"
    first, again = farm.leader.claimed[0], farm.leader.claimed[claims]
    assert (again.params, len(again.log)) == (first.params, 5)


def test_who_joined_by_key_brings_all_members_back(farm: TwoProcesses) -> None:
    """A list of prompts whose seeds the dead process drew: each comes back with its own, and the answer is one."""
    ask: dict[str, Any] = {
        "json": {"model": "tiny", "prompt": ["x: one", "x: two"], "max_tokens": 99, "temperature": 1},
        "headers": {"idempotency-key": "k"},
        "timeout": 15,
    }
    with ThreadPoolExecutor() as pool:
        pool.submit(httpx.post, f"{farm.first.url}/v1/completions", **ask)
        claimed = until(lambda: both(farm.leader.claimed))
        farm.kill_first()
        answer = pool.submit(httpx.post, f"{farm.second.url}/v1/completions", **ask)
        until(lambda: [line for line in farm.second.lines if line.get("action") == "take_up"])
        claims = len(farm.leader.claimed)
        farm.flush()
        again = until(lambda: both(farm.leader.claimed[claims:]), 20)
        farm.leader.resume()
        assert [choice["text"] for choice in answer.result().json()["choices"]] == ["you said one", "you said two"]
    assert again == claimed


def test_a_resume_waits_for_who_can_bring_it_back(farm: TwoProcesses) -> None:
    """Redis does not know the request that the client names: it is not refused, because its process is only slow."""
    farm.leader.step(3)
    body = chat("hello", stream=True)
    with (
        httpx.stream("POST", f"{farm.first.url}{CHAT}", json=body, timeout=15) as response,
        ThreadPoolExecutor() as pool,
    ):
        events_read = events(response.iter_lines())
        before = read_characters(events_read, 3)
        farm.first.process.send_signal(signal.SIGSTOP)
        try:
            farm.flush()
            headers = {"last-event-id": str(before[-1].id)}
            again = pool.submit(httpx.post, f"{farm.second.url}{CHAT}", json=body, headers=headers, timeout=15)
            until(lambda: [line for line in farm.second.lines if line.get("action") == "await_lost"])
        finally:
            farm.first.process.send_signal(signal.SIGCONT)
        farm.leader.resume()
        assert text_of([*before, *read_all(again.result())]) == "you said hello"
        assert text_of([*before, *events_read]) == "you said hello"


async def test_what_died_with_its_process_is_refused_in_the_end(server: Server, leader: ScriptedLeader) -> None:
    """Redis and the only process that knew the request are gone: the wait ends with an error that says so."""
    process = Process(ApiSettings(redis_url=server.url, lost_wait=0.3))
    caller = Caller(request_log=RequestLog(process.metrics, path="", client_request_id=None))
    with pytest.raises(RequestNotFound) as refused:
        await process.sessions.resume(StreamCursor("0123", [(3, 1)]), caller.identified("t"), "tiny")
    answer = problem(refused.value)
    assert answer.status == 404 and b"request_not_found" in answer.encode()
    await process.stop()
