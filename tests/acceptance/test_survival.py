"""Streams survive the kill of any process: no token lost, repeated or changed."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from control.redis.clients import connect
from control.redis.urls import password_in
from ops.client import ResumingTransport
from tests.acceptance.streams import Received, open_stream, receive
from tests.farm import Farm, serving_farm
from tests.waiting import lives, until

pytestmark = pytest.mark.timeout(240)

LONG: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 100."}],
    "temperature": 0,
    "max_tokens": 160,
}


PROMPT = "Count from 1 to 20. " * 350


def whole(farm: Farm, body: dict[str, Any]) -> Received:
    """The undisturbed answer."""
    received = Received()
    for _ in receive(open_stream(farm.address, body), received):
        pass
    assert received.finish and not received.errors
    return received


@pytest.fixture(scope="module")
def expected(shared_farm: Farm) -> Received:
    """The undisturbed answer to LONG."""
    until(shared_farm.ready)
    return whole(shared_farm, LONG)


@pytest.mark.parametrize("rank", [1, 0], ids=["rank", "leader"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_stream_goes_on_when_a_rank_dies_or_hangs(
    farm: Farm, expected: Received, rank: int, how: signal.Signals
) -> None:
    """The client's open connection just continues, with exactly the text of the undisturbed run."""
    epoch = farm.redis.get("furrow:{demo}:r0:epoch")
    received, struck = Received(), False
    for now in receive(open_stream(farm.address, LONG), received):
        if not struck and len(now.ids) > 20:
            struck = True
            farm.kill("demo", rank, how)
    assert struck and received.text == expected.text and received.finish == expected.finish
    assert received.errors == []
    assert farm.redis.get("furrow:{demo}:r0:epoch") != epoch, "the fault had no effect"
    assert len(set(received.ids)) == len(received.ids)


@pytest.mark.parametrize("rank", [1, 0], ids=["rank", "leader"])
def test_a_farm_at_rest_comes_back_by_itself(farm: Farm, rank: int) -> None:
    """After a kill without any request the farm is ready again and answers, and the reason can be read."""
    pid = farm.kill("demo", rank)
    until(lambda: farm.pid("demo", rank) != pid)
    until(farm.ready)
    [(_, poison)] = farm.redis.xrevrange("furrow:{demo}:r0:poisons", count=1)
    assert f"pid {pid}" in poison["message"] and "SIGKILL" in poison["message"]
    assert whole(farm, LONG).text.startswith("1, 2, 3")


@pytest.mark.parametrize("rank", [1, 0], ids=["rank", "leader"])
def test_a_dead_rank_is_forked_anew(farm: Farm, rank: int) -> None:
    """The standby stays what it is; where it dies with the rank, the rank starts alone, and a standby after it."""
    standby = until(lambda: ready_standby(farm))
    pid = farm.kill("demo", rank)
    until(lambda: farm.pid("demo", rank) != pid)
    until(farm.ready)
    assert until(lambda: ready_standby(farm)) == standby
    os.kill(standby, signal.SIGKILL)
    pid = farm.kill("demo", rank)
    until(lambda: farm.pid("demo", rank) != pid)
    until(farm.ready)
    assert whole(farm, LONG).text.startswith("1, 2, 3")
    assert until(lambda: ready_standby(farm)) != standby


def ready_standby(farm: Farm) -> int | None:
    """The pid of the host's standby, once it is ready."""
    [host] = farm.redis.smembers("furrow:hosts")
    if farm.redis.hget(f"furrow:host:{host}", "standby") != "ready":
        return None
    return next((pid for pid in farm.processes() if psutil.Process(pid).name() == "furrow-standby"), None)


def agent_pid(farm: Farm) -> int | None:
    """The process that is the host's agent."""
    return next((pid for pid in farm.processes() if psutil.Process(pid).name() == "furrow-agent"), None)


def adopted(farm: Farm, before: int) -> bool:
    """True if an agent after `before` beats for the host, which it does once it has adopted."""
    pid = agent_pid(farm)
    [host] = farm.redis.smembers("furrow:hosts")
    return pid not in (None, before) and farm.redis.hget(f"furrow:host:{host}", "pid") == str(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "replaced"])
def test_a_stream_and_every_rank_outlive_the_agent(farm: Farm, expected: Received, how: signal.Signals) -> None:
    """No rank restarts and no epoch ends; the next agent adopts the ranks and the standby, and looks after them."""
    standby, agent = until(lambda: ready_standby(farm)), until(lambda: agent_pid(farm))
    pids, epoch = [farm.pid("demo", rank) for rank in (0, 1)], farm.redis.get("furrow:{demo}:r0:epoch")
    received, struck = Received(), False
    for now in receive(open_stream(farm.address, LONG), received):
        if not struck and len(now.ids) > 20:
            struck = True
            os.kill(agent, how)
    assert struck and received.text == expected.text and received.finish == expected.finish
    until(lambda: adopted(farm, agent))
    assert [farm.pid("demo", rank) for rank in (0, 1)] == pids, "a rank was started again"
    assert farm.redis.get("furrow:{demo}:r0:epoch") == epoch and farm.ready()
    assert ready_standby(farm) == standby, "the standby was adopted too"
    pid = farm.kill("demo", 1)
    until(lambda: farm.pid("demo", 1) != pid)
    until(farm.ready)
    assert until(lambda: ready_standby(farm)) == standby, "it forked the rank"


def test_an_exit_while_there_is_no_agent_is_told_with_its_status(farm: Farm, expected: Received) -> None:
    """The supervisor reaps the rank and keeps the status; the next agent logs it and starts the rank again."""
    agent, pid = until(lambda: agent_pid(farm)), farm.pid("demo", 1)
    received, struck = Received(), False
    for now in receive(open_stream(farm.address, LONG), received):
        if not struck and len(now.ids) > 20:
            struck = True
            os.kill(agent, signal.SIGKILL)
            os.kill(pid, signal.SIGSEGV)
    assert struck and received.text == expected.text and received.finish == expected.finish
    until(lambda: adopted(farm, agent))
    until(farm.ready)
    assert farm.pid("demo", 1) != pid
    assert f"rank 1 (pid {pid}) killed by SIGSEGV" in farm.log.read_text()


def test_without_an_agent_ranks_give_back_what_they_run_and_end(expected: Received) -> None:
    """They finish the step, requeue and end; the agent that is there at last starts them again; no stream is cut."""
    options = "demo", "--tp", "2", "--devices", "cpu", "--dtype", "float64"
    with serving_farm(*options, FURROW_AGENT_ABSENT="3", FURROW_STANDBY="0") as farm, ThreadPoolExecutor(4) as pool:
        pids, agent = [farm.pid("demo", rank) for rank in (0, 1)], until(lambda: agent_pid(farm))
        over = threading.Event()

        def keep_asking() -> list[Received]:
            answers = [whole(farm, LONG)]
            while not over.is_set():
                answers.append(whole(farm, LONG))
            return answers

        answer_futures = [pool.submit(keep_asking) for _ in range(4)]
        os.kill(agent, signal.SIGSTOP)
        until(lambda: "no agent: the ranks end" in farm.log.read_text())
        until(lambda: not any(map(psutil.pid_exists, pids)))
        over.set()
        until(lambda: int(farm.redis.hget("furrow:{demo}:load", "queued") or 0) > 0)
        os.kill(agent, signal.SIGCONT)
        answers = [answer for future in answer_futures for answer in future.result()]
        assert f"rank 0 (pid {pids[0]}) stopped" in farm.log.read_text(), "it ended in order"
    assert {answer.text for answer in answers} == {expected.text}


def test_a_killed_api_is_replaced_and_the_client_resumes(farm: Farm, expected: Received) -> None:
    """The socket is cut; the same POST with Last-Event-ID brings the rest from the new process, exactly."""
    body = LONG | {"on_disconnect": "continue"}
    received = Received()
    [api] = [p for p in farm.processes() if psutil.Process(p).cmdline()[2:4] == ["-m", "api"]]
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        for now in receive(open_stream(farm.address, body), received):
            if len(now.ids) == 20:
                os.kill(api, signal.SIGKILL)
        raise http.client.IncompleteRead(b"")  # a cut without an error is a cut too
    assert received.finish is None
    until(farm.ready)
    for _ in receive(open_stream(farm.address, body, {"Last-Event-ID": received.last_id}), received):
        pass
    assert received.text == expected.text and received.finish == expected.finish
    assert len(set(received.ids)) == len(received.ids)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_official_client_outlives_a_killed_api(farm: Farm, expected: Received, stream: bool) -> None:
    """Over the resuming transport the caller sees the undisturbed answer, made once, with no key or policy given."""
    before = farm.redis.hget("furrow:{demo}:load", "enqueued")
    [api] = [p for p in farm.processes() if psutil.Process(p).cmdline()[2:4] == ["-m", "api"]]
    http = httpx.Client(transport=ResumingTransport(), timeout=60)
    with (
        openai.OpenAI(base_url=farm.base_url, api_key="none", max_retries=0, http_client=http) as client,
        ThreadPoolExecutor() as pool,
    ):
        future = pool.submit(answer, client, stream)
        until(lambda: int(farm.redis.hget("furrow:{demo}:load", "enqueued") or 0) > int(before or 0))
        os.kill(api, signal.SIGKILL)
        assert not future.done(), "the answer came before the fault"
        assert future.result() == expected.text
    assert int(farm.redis.hget("furrow:{demo}:load", "enqueued") or 0) == int(before or 0) + 1


def answer(client: openai.OpenAI, stream: bool) -> str:
    """The answer to LONG."""
    if not stream:
        return client.chat.completions.create(**LONG).choices[0].message.content or ""
    chunks = client.chat.completions.create(**LONG, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def kill_server(farm: Farm) -> None:
    """SIGKILL to the private server; its parent starts it again on the same data."""
    os.kill(farm.redis.info()["process_id"], signal.SIGKILL)


def lose_everything(farm: Farm) -> None:
    """Empty Redis, as a crash of a server without persistence does."""
    farm.redis.flushall()


@pytest.mark.parametrize("strike", [kill_server, lose_everything])
def test_a_stream_goes_on_when_redis_dies_or_loses_everything(
    farm: Farm, expected: Received, strike: Callable[[Farm], None]
) -> None:
    """Nothing is reloaded and no token is lost: the processes hold what they know and put it back."""
    pids = [farm.pid("demo", rank) for rank in (0, 1)]
    run_id = farm.redis.info()["run_id"]
    received, struck = Received(), False
    for now in receive(open_stream(farm.address, LONG), received):
        if not struck and len(now.ids) > 20:
            struck = True
            strike(farm)
    assert struck and received.text == expected.text and received.finish == expected.finish
    assert received.errors == []
    until(farm.ready)
    assert [farm.pid("demo", rank) for rank in (0, 1)] == pids, "a rank was started again"
    if strike is kill_server:
        assert farm.redis.info()["run_id"] != run_id, "the fault had no effect"


def settled(farm: Farm) -> list[int] | None:
    """The processes of the farm, once none begins or ends: one of an earlier test may be on its way out."""
    pids = farm.processes()
    time.sleep(0.5)
    return pids if farm.processes() == pids else None


def rotate(farm: Farm, password: str) -> None:
    """Give the server another password, then write the file, and cut every connection: each must come again."""
    file = farm.log.parent / "data" / "url"
    old = file.read_text()
    with connect(str(file)) as client:
        client.config_set("requirepass", password)
        file.write_text(old.replace(str(password_in(old)), password))
        for kind in ("normal", "pubsub"):
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


def test_a_stream_goes_on_when_the_password_is_rotated(farm: Farm, expected: Received) -> None:
    """Agent, ranks and API read the file with the URL again: no process starts anew, no token is lost."""
    pids, password = until(lambda: settled(farm)), str(password_in(farm.redis_url))
    received, struck = Received(), False
    try:
        for now in receive(open_stream(farm.address, LONG), received):
            if not struck and len(now.ids) > 20:
                struck = True
                rotate(farm, "another")
        assert struck and received.text == expected.text and received.finish == expected.finish
        assert received.errors == []
        assert farm.furrow("doctor").returncode == 2, "the old password is still good"
        until(farm.ready)
        assert farm.processes() == pids, "a process was started again"
    finally:
        rotate(farm, password)


PAUSE_S = 2.5
"""Longer than a lock lives."""


@pytest.mark.parametrize("mechanism", [True, False], ids=["kept", "control"])
def test_a_prefill_outlives_a_pause_of_redis(farm: Farm, mechanism: bool) -> None:
    """The lock runs out while a long prompt is computed, and is taken again: the same epoch goes on, and what was
    computed is not computed again. The control may not take it again: another epoch begins with the whole prompt."""
    body: dict[str, Any] = LONG | {"max_tokens": 16, "messages": [{"role": "user", "content": PROMPT}]}
    server = psutil.Process(farm.redis.info()["process_id"])
    until(lambda: farm.redis.hget("furrow:{demo}:r0:hb:0", "running") == "0")
    epoch = farm.redis.get("furrow:{demo}:r0:epoch")
    with ThreadPoolExecutor() as pool:
        future = pool.submit(whole, farm, body | {"cache_salt": f"paused {mechanism}"})
        rid = until(lambda: running(farm))
        if not mechanism:
            farm.redis.delete("furrow:{demo}:r0:server")
        assert farm.redis.hget(f"furrow:{{demo}}:req:{rid}", "t_first") is None, "the prompt was computed already"
        server.suspend()
        try:
            time.sleep(PAUSE_S)
        finally:
            resumed_ms = 1000 * time.time()
            server.resume()
        received = future.result()
    assert int(farm.redis.hget(f"furrow:{{demo}}:req:{rid}", "t_first")) >= resumed_ms, "it was no prefill any more"
    hands = farm.redis.hget(f"furrow:{{demo}}:req:{rid}", "epochs").split()
    assert (farm.redis.get("furrow:{demo}:r0:epoch") == epoch, len(hands)) == ((True, 1) if mechanism else (False, 2))
    assert received.text == whole(farm, body | {"cache_salt": "undisturbed"}).text


def running(farm: Farm) -> str | None:
    """The only request that runs."""
    members = farm.redis.zrange("furrow:{demo}:r0:running", 0, -1)
    return members[0].split()[0] if members else None


def test_64_streams_complete_with_every_token_in_order(farm: Farm) -> None:
    """64 clients at once each get exactly the answer that one alone gets."""
    bodies = [
        LONG | {"messages": [{"role": "user", "content": f"Count from {1 + i % 4} to 60."}], "max_tokens": 64}
        for i in range(64)
    ]
    expected = [whole(farm, body).text for body in bodies[:4]]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda body: whole(farm, body), bodies))
    assert [answer.text for answer in answers] == [expected[i % 4] for i in range(64)]
    for answer in answers:
        numbers = [tuple(map(int, event_id.rpartition(":")[2].split("."))) for event_id in answer.ids]
        assert numbers == sorted(set(numbers))


def test_nothing_is_left_when_the_parent_stops_or_is_killed() -> None:
    """Ctrl-C ends everything with status 0; kill -9 of the parent leaves no server, agent, rank or API either."""
    with serving_farm("demo", "--devices", "cpu", FURROW_STANDBY="0") as farm:
        processes = farm.processes()
        assert len(processes) >= 5
        assert farm.stop() == 0
        assert not any(map(psutil.pid_exists, processes))
    with serving_farm("demo", "--devices", "cpu") as farm:
        until(lambda: ready_standby(farm))
        processes = [psutil.Process(pid) for pid in farm.processes()]
        farm.process.kill()
        until(lambda: not any(map(lives, processes)))
