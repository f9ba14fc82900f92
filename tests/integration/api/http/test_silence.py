"""Silent streams carry comments that official clients ignore: between events, and no text changes."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest

from ops.client import ResumingTransport
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import events, text_of
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

COMMENT = b": keep-alive\n"
COMMENTS = 6
"""Comments that a pause of 0.6 s holds with a keep-alive of 0.1 s."""
SAID = "you said hello"
STEPS = 4
"""Steps before the pause: the client has events with ids by then."""
CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def impatient(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    with running_api(server.url, tmp_path_factory.mktemp("impatient"), "--keep-alive", "0.1") as process:
        yield process


class Ear:
    """A relay before an API process that keeps every byte of the answers; `url` is its own."""

    def __init__(self, port: int) -> None:
        self.heard = b""
        ear = self

        class Relay(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(("127.0.0.1", port)) as api:
                    asking = threading.Thread(target=self.ask, args=(api,))
                    asking.start()
                    while data := api.recv(65536):
                        ear.heard += data
                        self.request.sendall(data)
                    with suppress(OSError):  # the client may have left first
                        self.request.shutdown(socket.SHUT_RDWR)
                    asking.join()

            def ask(self, api: socket.socket) -> None:
                with suppress(OSError):
                    while data := self.request.recv(65536):
                        api.sendall(data)
                with suppress(OSError):
                    api.shutdown(socket.SHUT_RDWR)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def silenced(self) -> bool:
        """True if the comments of a pause have come, and an event before them."""
        return self.heard.count(COMMENT) >= COMMENTS and b"\ndata: " in self.heard.partition(COMMENT)[0]


@pytest.fixture
def ear(impatient: ApiProcess) -> Iterator[Ear]:
    ear = Ear(impatient.port)
    thread = threading.Thread(target=ear.server.serve_forever, args=(0.01,))
    thread.start()
    yield ear
    ear.server.shutdown()
    thread.join()
    ear.server.server_close()


@contextmanager
def paused(leader: ScriptedLeader, ear: Ear) -> Iterator[None]:
    """The leader stops after a few steps, until the comments of a pause have been sent."""
    leader.pause()
    leader.step(STEPS)
    left = threading.Event()

    def release() -> None:
        until(lambda: ear.silenced or left.is_set())
        leader.resume()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield
    finally:
        left.set()
        leader.resume()
        thread.join()


def chat(client: Any) -> str:
    chunks = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def chat_helper(client: Any) -> str:
    with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        return stream.get_final_completion().choices[0].message.content


def completions(client: Any) -> str:
    chunks = client.completions.create(model="tiny", prompt="hello", max_tokens=50, stream=True)
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def responses(client: Any) -> str:
    events = client.responses.create(model="tiny", input="hello", stream=True)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def background(client: Any) -> str:
    events = list(client.responses.create(model="tiny", input="hello", background=True, stream=True))
    return events[-1].response.output_text


def messages(client: Any) -> str:
    with client.messages.stream(model="tiny", max_tokens=50, messages=HELLO) as stream:
        return "".join(stream.text_stream)


@pytest.mark.parametrize("ask", [chat, chat_helper, completions, responses, background, messages])
def test_a_silent_stream_goes_on(ear: Ear, leader: ScriptedLeader, ask: Callable[[Any], str]) -> None:
    """Comments after an event with an id change nothing for the clients and their streaming helpers."""
    kind, base = (anthropic.Anthropic, "") if ask is messages else (openai.OpenAI, "/v1")
    with kind(base_url=ear.url + base, api_key="x", max_retries=0, timeout=40) as client:
        with paused(leader, ear):
            said = ask(client)
        assert ear.silenced
        assert said == ask(client) == SAID


def test_a_silent_stream_goes_on_under_the_resuming_transport(ear: Ear, leader: ScriptedLeader) -> None:
    """The transport hands comments on as they come."""
    heard: list[bytes] = []
    with (
        httpx.Client(transport=ResumingTransport(), timeout=40) as http,
        paused(leader, ear),
        http.stream("POST", ear.url + CHAT, json={"messages": HELLO, "stream": True}) as response,
    ):
        for data in response.iter_raw():
            heard.append(data)
    assert b"".join(heard).count(COMMENT) >= COMMENTS
    assert text_of(events(b"".join(heard).decode().splitlines())) == SAID


def test_a_comment_is_one_line(impatient: ApiProcess, leader: ScriptedLeader) -> None:
    """No comment has an empty line behind it, be it a keep-alive or a position in the queue."""
    leader.claiming = False
    heard = b""
    with httpx.stream("POST", impatient.url + CHAT, json={"messages": HELLO, "stream": True}, timeout=40) as response:
        for data in response.iter_raw():
            heard += data
            leader.claiming = heard.count(COMMENT) >= 2
    head, _, rest = heard.partition(b"id: ")
    assert head.startswith(b": queue position 1\n" + COMMENT)
    assert all(line.startswith(b": ") for line in head.splitlines())
    assert rest.endswith(b"data: [DONE]\n\n")
