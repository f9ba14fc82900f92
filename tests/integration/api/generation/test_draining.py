"""A draining API process finishes what runs: new requests go elsewhere, and what outlives the grace is told how to go
on."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

from control.keys import ModelKeys
from ops.client import ResumingTransport
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat, events, read_all, text_of
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

CHAT = "/v1/chat/completions"


def drains(api: ApiProcess) -> bool:
    return httpx.get(f"{api.url}/health").json() == {"status": "draining"}


def ask(api: ApiProcess, **fields: Any) -> httpx.Response:
    return httpx.post(f"{api.url}{CHAT}", json=chat("hello", **fields), timeout=40)


def ended_cleanly(api: ApiProcess) -> bool:
    """Status 0, and nothing in the log that looks like an accident."""
    return api.process.wait(40) == 0 and not [line for line in api.lines if line.get("level") == "error"]


def test_sigterm_finishes_open_streams_and_refuses_new_requests(
    server: Server, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """An open stream is finished before the process ends; meanwhile whoever comes is told at once to go elsewhere."""
    leader.pause()
    with running_api(server.url, tmp_path) as api:
        with httpx.stream("POST", f"{api.url}{CHAT}", json=chat("hello", stream=True), timeout=40) as response:
            leader.step()
            events_read = events(response.iter_lines())
            text = next(event for event in events_read if event.text).text
            api.process.send_signal(signal.SIGTERM)
            until(lambda: drains(api))
            ready = httpx.get(f"{api.url}/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "this process is shutting down")
            follow = httpx.get(f"{api.url}/v1/requests/{response.headers['x-request-id']}/events")
            for refused in (ask(api), ask(api, stream=True), follow):
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
            leader.resume()
            assert text + text_of(events_read) == "you said hello"
        assert ended_cleanly(api)
        assert len([line for line in api.lines if line.get("status") == 200]) == 1


def test_an_idle_process_stops_at_once(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """A kept-alive connection without a request holds nobody up."""
    with running_api(server.url, tmp_path) as api, httpx.Client(base_url=api.url) as idle:
        assert idle.get("/health").status_code == 200
        api.process.send_signal(signal.SIGTERM)
        assert ended_cleanly(api)


def test_what_outlives_the_grace_is_told_how_to_go_on(
    server: Server, leader: ScriptedLeader, api: ApiProcess, redis_client: Any, tmp_path: Path
) -> None:
    """A stream ends with an error event that is no place of its own, another answer with 503; both go on elsewhere."""
    leader.pause()
    with running_api(server.url, tmp_path, "--grace", "1") as dying, ThreadPoolExecutor() as pool:
        key = {"idempotency-key": "outlives"}
        waiting = pool.submit(httpx.post, f"{dying.url}{CHAT}", json=chat("wait"), headers=key, timeout=40)
        with httpx.stream("POST", f"{dying.url}{CHAT}", json=chat("hello", stream=True), timeout=40) as response:
            rid = response.headers["x-request-id"]
            leader.step()
            lines = events(response.iter_lines())
            found = [next(event for event in lines if event.data)]
            dying.process.send_signal(signal.SIGTERM)
            found += lines
        assert ended_cleanly(dying)
        error = found.pop().data["error"]
        assert error["code"] == "stream_interrupted"
        assert f"Last-Event-ID: {found[-1].id}" in error["message"]
        (line,) = dying.ended(rid)
        assert (line["status"], line["error"], line["completion_tokens"]) == (503, "cut by shutdown", 1)
        refused = waiting.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stream_interrupted")
    assert redis_client.hget(ModelKeys("tiny").request(rid), "state") == "running"
    leader.resume()
    rest = httpx.get(f"{api.url}/v1/requests/{rid}/events", headers={"last-event-id": str(found[-1].id)}, timeout=40)
    assert text_of(found) + text_of(read_all(rest)) == "you said hello"
    again = httpx.post(f"{api.url}{CHAT}", json=chat("wait"), headers=key, timeout=40)
    assert again.json()["choices"][0]["message"]["content"] == "you said wait"
    assert len(leader.claimed) == 2


def test_a_second_signal_ends_the_grace(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """A second signal ends the process without waiting for open streams."""
    leader.pause()
    with running_api(server.url, tmp_path, "--grace", "300") as api:
        with httpx.stream("POST", f"{api.url}{CHAT}", json=chat("hello", stream=True), timeout=40) as response:
            leader.step()
            api.process.send_signal(signal.SIGINT)
            until(lambda: drains(api))
            api.process.send_signal(signal.SIGINT)
            events = read_all(response)
        assert events[-1].data["error"]["code"] == "stream_interrupted"
        assert ended_cleanly(api)


def test_the_official_client_notices_nothing_of_a_stop(
    server: Server, leader: ScriptedLeader, api: ApiProcess, tmp_path: Path
) -> None:
    """Over the resuming transport an answer goes on from a process whose grace was too short to another one."""
    with running_api(server.url, tmp_path, "--grace", "0") as dying:
        leader.pause()
        leader.step(3)
        http = httpx.Client(transport=ResumingTransport([api.url]), timeout=40)
        with openai.OpenAI(base_url=f"{dying.url}/v1", api_key="s", max_retries=0, http_client=http) as client:
            stream = client.chat.completions.create(**chat("hello"), stream=True)
            text = ""
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if dying.process.poll() is None:
                    dying.process.send_signal(signal.SIGTERM)
                    dying.process.wait(40)
                    leader.resume()
        assert text == "you said hello"
        assert ended_cleanly(dying)
