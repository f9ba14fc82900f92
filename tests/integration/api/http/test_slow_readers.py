"""A slow client delays nobody: it gets everything; one that reads nothing is cut, and can come back."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from control.keys import ModelKeys
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat, events, read_all, text_of
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

CHAT = "/v1/chat/completions"
LONG = "0123456789" * 60
HALF = 400
"""Tokens; with log probabilities more than a hundred kilobytes, of which the client's kernel takes five."""


class StalledClient:
    """A raw socket that asks for a long stream and does not read it."""

    def __init__(self, api: ApiProcess, **fields: Any) -> None:
        body = json.dumps(chat("x", stream=True, logprobs=True, top_logprobs=2, **fields)).encode()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", api.port))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self._socket.sendall(head.encode() + b"\r\n\r\n" + body)

    def rest(self) -> bytes:
        """The bytes that had arrived when the connection ended."""
        received = b""
        self._socket.settimeout(40)
        try:
            while data := self._socket.recv(65536):
                received += data
        except ConnectionResetError:
            pass
        self._socket.close()
        return received


@pytest.fixture
def strict(server: Server, leader: ScriptedLeader, tmp_path: Path) -> Iterator[ApiProcess]:
    """A process that cuts after half a second."""
    with running_api(server.url, tmp_path, "--reader-timeout", "0.5") as process:
        yield process


def test_a_slow_reader_gets_everything(api: ApiProcess, leader: ScriptedLeader) -> None:
    """A client that does not read while thousands of tokens come finds them all, and slows nobody."""
    leader.reply = lambda _: "0123456789" * 300
    with httpx.stream("POST", f"{api.url}{CHAT}", json=chat("x", stream=True), timeout=40) as slow:
        until(lambda: len(leader.claimed) == 1)
        assert httpx.post(f"{api.url}{CHAT}", json=chat("y"), timeout=40).status_code == 200
        assert text_of(read_all(slow)) == "0123456789" * 300


def test_a_client_that_reads_nothing_is_cut_and_can_resume(
    strict: ApiProcess, leader: ScriptedLeader, redis_client: Any
) -> None:
    """It holds a bounded buffer for a bounded time, others go on, and its request waits for it as for a cut one."""
    leader.reply = lambda prompt: LONG if "x" in prompt else LONG[:300]
    leader.pause()
    stalled = StalledClient(strict)
    until(lambda: leader.claimed)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(httpx.post, f"{strict.url}{CHAT}", json=chat("y"), timeout=40)
        until(lambda: len(leader.claimed) == 2)
        leader.step(HALF)
        assert other.result().json()["choices"][0]["message"]["content"] == LONG[:300]
    (cut,) = until(lambda: [line for line in strict.lines if line.get("action") == "cut_reader"], 15)
    assert 0 <= cut["waiting_bytes"] < 512 * 1024
    rid = leader.claimed[0].rid
    (line,) = until(lambda: strict.ended(rid))
    assert (line["status"], line["error"]) == (499, "cut: the client read nothing")
    assert redis_client.hget(ModelKeys("tiny").request(rid), "state") == "running"
    leader.resume()
    until(lambda: redis_client.hget(ModelKeys("tiny").request(rid), "state") == "finished", 15)
    matches = re.findall(rb"id: ([^\n]+)\ndata: ([^\n]+)\n\n", stalled.rest())
    chunks = [json.loads(data) for _, data in matches]
    follow = httpx.get(
        f"{strict.url}/v1/requests/{rid}/events", headers={"last-event-id": matches[-1][0].decode()}, timeout=15
    )
    chunks += [event.data for event in events(follow.text.splitlines()) if event.data]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == LONG


def test_a_client_that_reads_nothing_does_not_hold_up_a_stop(
    server: Server, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """With the grace over, a connection that takes not even the last event is cut, and the process ends cleanly."""
    leader.reply = lambda _: LONG
    leader.pause()
    with running_api(server.url, tmp_path, "--grace", "1") as api:
        stalled = StalledClient(api)
        until(lambda: leader.claimed)
        leader.step(HALF)
        api.process.send_signal(signal.SIGTERM)
        assert api.process.wait(40) == 0
        assert not [line for line in api.lines if line.get("level") == "error"]
        stalled.rest()
