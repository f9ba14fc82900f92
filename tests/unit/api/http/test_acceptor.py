"""Connections are accepted all at once; and none is made for a client that has left."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator

import pytest

from api.http import connection as connections
from api.http.connection import Acceptor


class Recorder(asyncio.Protocol):
    """Notes each connection and what it sends."""

    def __init__(self, made: list[Recorder]) -> None:
        self.made, self.data, self.closed = made, b"", asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(self)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(b"answer to " + data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as one:
        one.setblocking(False)
        yield one


def connect(listening: socket.socket) -> socket.socket:
    return socket.create_connection(listening.getsockname(), timeout=10)


async def test_all_that_wait_are_accepted_and_answered(listening: socket.socket) -> None:
    clients = [connect(listening) for _ in range(100)]
    for client in clients:
        client.sendall(b"hello")
    made: list[Recorder] = []
    taking = Acceptor(listening.dup(), lambda: Recorder(made))
    for client in clients:
        client.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(client, 100) == b"answer to hello"
        client.close()
    for one in made:
        await one.closed.wait()
    assert len(made) == 100
    taking.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not tell the state of a connection")
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "control"])
async def test_nothing_is_made_for_a_client_that_left(
    listening: socket.socket, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:
        monkeypatch.setattr(connections, "client_left", lambda connection: False)
    for _ in range(50):
        with connect(listening) as client:
            client.sendall(b"hello")
    last = connect(listening)
    last.setblocking(False)
    made: list[Recorder] = []
    taking = Acceptor(listening.dup(), lambda: Recorder(made))
    last.send(b"last")
    assert await asyncio.get_running_loop().sock_recv(last, 100) == b"answer to last"
    assert len(made) == (1 if looks else 51)
    last.close()
    for one in made:
        await one.closed.wait()
    taking.close()


async def test_too_many_open_files_are_waited_for(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing accept is tried again, and the connection is not lost."""
    monkeypatch.setattr(connections, "_ACCEPT_AGAIN_S", 0.01)
    made, failures = list[Recorder](), [OSError(24, "Too many open files")] * 2

    class Failing(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return super().accept()

    failing = Failing(fileno=listening.dup().detach())
    failing.setblocking(False)
    taking = Acceptor(failing, lambda: Recorder(made))
    client = connect(listening)
    client.setblocking(False)
    client.send(b"hello")
    assert await asyncio.get_running_loop().sock_recv(client, 100) == b"answer to hello"
    client.close()
    await made[0].closed.wait()
    taking.close()


async def test_a_server_is_replaced_without_losing_a_connection() -> None:
    made: list[Recorder] = []
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    [taking] = Acceptor.instead_of(server, lambda: Recorder(made))
    client = socket.create_connection(address, timeout=10)
    client.setblocking(False)
    client.send(b"hello")
    assert await asyncio.get_running_loop().sock_recv(client, 100) == b"answer to hello"
    client.close()
    await made[0].closed.wait()
    taking.close()
    taking.close()
    with pytest.raises(ConnectionError):
        socket.create_connection(address, timeout=10)


@pytest.mark.skipif(sys.platform != "linux", reason="this system has one loopback address")
async def test_addresses_take_turns(listening: socket.socket) -> None:
    """A burst from one address is not in front of the connection of another one that comes after it."""
    burst: list[socket.socket] = []
    for _ in range(100):
        burst.append(socket.create_connection(listening.getsockname(), timeout=10, source_address=("127.0.0.2", 0)))
    other = connect(listening)
    made: list[Recorder] = []
    taking = Acceptor(listening.dup(), lambda: Recorder(made))
    other.setblocking(False)
    other.send(b"hello")
    assert await asyncio.get_running_loop().sock_recv(other, 100) == b"answer to hello"
    addresses = [one.transport.get_extra_info("peername")[0] for one in made]
    assert addresses.index("127.0.0.1") == 1
    while len(made) < 101:
        await asyncio.sleep(0)
    for client in (*burst, other):
        client.close()
    for one in made:
        await one.closed.wait()
    taking.close()
