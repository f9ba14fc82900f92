"""Requests wait for their tenant's turn before any work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from api.http.connection import Client, UnreadBodies, client_of, set_client
from api.http.middleware import Admission
from api.http.turns import current_tenant

Work = Callable[[Client], Awaitable[None]]


class Server:
    """An application whose work is given with each request, behind the turns."""

    def __init__(self, longest_s: float = 60.0) -> None:
        self.refused: list[int] = []
        self.admission = Admission(longest_s, self.refused.append)
        self.order: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self._app = self.admission.in_turn(self._serve, lambda scope: str(scope["query_string"]))

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        self.order.append(scope["query_string"])
        await scope["work"](client_of(scope))

    def request(self, tenant: str, work: Work, client: Client | None = None) -> asyncio.Task[None]:
        scope: Any = {
            "type": "http",
            "path": "/v1/chat/completions",
            "query_string": tenant,
            "headers": [],
            "work": work,
        }
        if client is not None:
            set_client(scope, client)

        async def serve() -> None:
            await self._app(scope, _receive, self._send)

        return asyncio.create_task(serve())

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def _receive() -> Any:
    raise AssertionError("no request is read here")


async def nothing(client: Client) -> None:
    pass


def waits_for(event: asyncio.Event) -> Work:
    async def work(client: Client) -> None:
        await event.wait()

    return work


def computes(seconds: float) -> Work:
    async def work(client: Client) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    return work


async def test_another_tenant_goes_before_those_that_wait() -> None:
    server = Server()
    tasks = [server.request("crowd", computes(0.001)) for _ in range(50)]
    tasks.append(server.request("other", nothing))
    await asyncio.gather(*tasks)
    assert server.order.index("other") <= 2


async def test_a_tenant_with_dear_requests_has_fewer_turns() -> None:
    server = Server()
    dear = [server.request("dear", computes(0.02)) for _ in range(10)]
    cheap = [server.request("cheap", computes(0.002)) for _ in range(10)]
    await asyncio.gather(*dear, *cheap)
    assert server.order[:14].count("cheap") >= 8


async def test_a_request_that_waits_for_something_holds_no_turn() -> None:
    server, event = Server(), asyncio.Event()
    waiting = [server.request("a", waits_for(event)) for _ in range(3)]
    while len(server.order) < 3:
        await asyncio.sleep(0)
    await server.request("b", nothing)
    event.set()
    await asyncio.gather(*waiting)
    assert not server.admission.turns.waiting


async def test_nothing_is_done_for_a_client_that_left_while_it_waited() -> None:
    server, client, event = Server(), Client(), asyncio.Event()

    async def leaves(_: Client) -> None:
        client.leave()

    await asyncio.gather(server.request("a", leaves), server.request("a", nothing, client))
    assert server.order == ["a"]
    event.set()


async def test_nothing_is_done_for_a_tenant_whose_clients_leave_at_once() -> None:
    """Once most have left at once, the next ones have left before they are begun. Other tenants do not wait."""
    server = Server()

    async def leaves(client: Client) -> None:
        client.leave()

    for _ in range(40):
        await server.request("cuts", leaves)
    server.order.clear()
    client = Client()
    waiting = server.request("cuts", nothing, client)
    await server.request("other", nothing)
    client.leave()
    await waiting
    assert server.order == ["other"]


async def test_a_tenant_with_too_much_work_waiting_is_refused_and_no_other() -> None:
    server = Server(longest_s=0.01)
    tasks = [server.request("crowd", computes(0.001)) for _ in range(200)]
    tasks.append(server.request("other", nothing))
    await asyncio.gather(*tasks)
    assert "other" in server.order
    starts = [message for message in server.sent if message["type"] == "http.response.start"]
    assert len(starts) == 200 - server.order.count("crowd") > 0
    assert {start["status"] for start in starts} == {429}
    assert server.refused == [429] * len(starts)
    assert int(dict(starts[0]["headers"])[b"retry-after"]) >= 1
    body = next(message for message in server.sent if message["type"] == "http.response.body")
    assert msgspec.json.decode(body["body"])["error"]["code"] == "too_many_waiting"


async def test_the_turn_is_waited_for_again_after_the_body() -> None:
    server, body = Server(), asyncio.Event()

    async def reads(client: Client) -> None:
        await body.wait()
        await client.turn_again()
        server.order.append("read")

    reading = server.request("crowd", reads)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    crowd = [server.request("crowd", nothing) for _ in range(10)]
    other = server.request("other", nothing)
    body.set()
    await asyncio.gather(reading, *crowd, other)
    assert server.order.index("other") < server.order.index("read")


async def test_work_after_the_admission_is_not_charged() -> None:
    server, event = Server(), asyncio.Event()

    async def streams(client: Client) -> None:
        client.admitted()
        await event.wait()
        await computes(0.05)(client)

    task = server.request("a", streams)
    while server.admission.turns.running or not server.order:
        await asyncio.sleep(0)
    event.set()
    await task


async def test_the_tenant_is_known_where_it_is_not_handed_on() -> None:
    server, seen = Server(), list[str]()

    async def looks(client: Client) -> None:
        seen.append(current_tenant.get())

    await asyncio.gather(server.request("a", looks), server.request("b", looks))
    assert seen == ["a", "b"]


@pytest.mark.parametrize("admitted", [False, True])
async def test_errors_and_cancellations_pass(admitted: bool) -> None:
    server, ended = Server(), list[str]()

    async def works(client: Client) -> None:
        if admitted:
            client.admitted()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            await asyncio.sleep(0)
            ended.append("cleaned up")
            raise

    async def fails(client: Client) -> None:
        if admitted:
            client.admitted()
        await asyncio.sleep(0)
        raise ValueError("x")

    task = server.request("a", works)
    while not server.order:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled", "cleaned up"]
    with pytest.raises(ValueError, match="x"):
        await server.request("a", fails)
    while server.admission.turns.running:  # the last place is free in the next iteration of the loop
        await asyncio.sleep(0)


async def test_unread_bodies_are_bounded_until_the_request_is_handled() -> None:
    bodies = UnreadBodies(limit=100)
    first, second = Client(bodies), Client(bodies)
    assert first.receive(60)
    assert not second.receive(60)
    first.begin()
    assert bodies.size == 60
    assert first.receive(1000)  # its reader counts from now on
    second.leave()
    assert bodies.size == 0


async def test_a_client_that_leaves_wakes_its_watcher() -> None:
    client, woken = Client(), list[int]()
    with client.watched(lambda: woken.append(1)):
        client.leave()
    with client.watched(lambda: woken.append(2)):
        pass
    assert woken == [1, 2]
