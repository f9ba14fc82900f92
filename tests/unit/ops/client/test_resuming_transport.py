"""The resuming transport gives the same bytes wherever cut: against a scripted API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from ops.client import AsyncResumingTransport, ResumeRefused, ResumingTransport
from ops.client.events import parsed

BODY = {"messages": [], "stream": True}
EVENTS = [
    ": queue position 2\n",
    'id: r:0.2\ndata: {"n": 0}\n\n',
    'id: r:1.1\ndata: {"n": "é"}\n\n',
    ": keep-alive\n",
    'id: r:2.1\ndata: {"n": 2}\n\n',
    "id: r:2.4\ndata: [DONE]\n\n",
]
WHOLE = "".join(EVENTS).encode()
GOES = b'data: {"error":{"message":"resume","code":"stream_interrupted"}}\n\n'


class Cut(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Sends `data` in two halves, then breaks the connection, or ends it."""

    def __init__(self, data: bytes, broken: bool) -> None:
        self._data, self._broken = data, broken

    def __iter__(self) -> Iterator[bytes]:
        middle = len(self._data) // 2
        yield self._data[:middle]
        yield self._data[middle:]
        if self._broken:
            raise httpx.ReadError("cut")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self:
            yield data


class ScriptedApi(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers attempt k with what `script[k]` makes of the bytes that the client still lacks; then with all of them."""

    def __init__(self, *script: Callable[[bytes], httpx.Response]) -> None:
        self.script = list(script)
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "DELETE":
            return httpx.Response(200, json={})
        step = self.script.pop(0) if self.script else stream
        return step(self.rest(request.headers.get("last-event-id")))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)

    @staticmethod
    def rest(last: str | None) -> bytes:
        at = next((i + 1 for i, event in enumerate(EVENTS) if last and event.startswith(f"id: {last}\n")), 0)
        return "".join(EVENTS[at:]).encode()


def stream(data: bytes, broken: bool = False) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Cut(data, broken))


def cut(at: int, broken: bool = True) -> Callable[[bytes], httpx.Response]:
    return lambda data: stream(data[:at], broken)


def refuse(status: int, **headers: str) -> Callable[[bytes], httpx.Response]:
    return lambda _: httpx.Response(status, headers=headers, json={"error": {}})


def unreachable(_: bytes) -> httpx.Response:
    raise httpx.ConnectError("refused")


def client(api: ScriptedApi, *also: str, patience: float = 5.0) -> httpx.Client:
    return httpx.Client(transport=ResumingTransport(also, patience=patience, transport=api), base_url="http://a")


def read(api: ScriptedApi, *also: str, **request: Any) -> bytes:
    with client(api, *also) as http, http.stream("POST", "/v1/chat/completions", json=BODY, **request) as response:
        return b"".join(response.iter_raw())


def events_of(data: bytes) -> list[bytes]:
    return [event.raw for event in parsed([data]) if event.data]


@pytest.mark.parametrize("broken", [True, False], ids=["broken", "ended"])
def test_a_cut_at_any_byte_changes_nothing(broken: bool) -> None:
    """Every event comes once and whole, whether the connection broke or just ended; comments may come again."""
    for at in range(len(WHOLE)):
        api = ScriptedApi(cut(at, broken))
        assert events_of(read(api, "http://b")) == events_of(WHOLE), at
        assert [str(request.url.host) for request in api.requests] == ["a", "b"]
        first, second = api.requests
        assert first.content == second.content
        assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
        assert second.headers["host"] == "b"


async def test_the_same_on_asyncio() -> None:
    """The asynchronous transport resumes at every byte as well."""
    for at in range(len(WHOLE)):
        transport = AsyncResumingTransport(["http://b"], transport=ScriptedApi(cut(at)))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://a") as http,
            http.stream("POST", "/v1/chat/completions", json=BODY) as response,
        ):
            assert events_of(b"".join([data async for data in response.aiter_raw()])) == events_of(WHOLE)


def test_a_server_that_goes_says_so_and_the_client_does_not_see_it() -> None:
    """The event of a process that shuts down is swallowed, and the answer goes on elsewhere."""
    api = ScriptedApi(lambda data: stream(data[: data.index(b"id: r:2.1")] + GOES))
    assert events_of(read(api, "http://b")) == events_of(WHOLE)
    assert api.requests[1].headers["last-event-id"] == "r:1.1"


def test_away_for_a_while() -> None:
    """Refused connections, gateways without a server and 503 are waited out, before the first byte and after a cut."""
    api = ScriptedApi(unreachable, refuse(503), refuse(502), cut(60), unreachable, refuse(404), refuse(503))
    assert events_of(read(api)) == events_of(WHOLE)
    assert len(api.requests) == 8


def test_what_is_not_waited_out() -> None:
    """Other refusals come through at once, with their bodies; so does a 503 that says that a retry is no use."""
    for step in (refuse(400), refuse(429), refuse(503, **{"x-should-retry": "false"})):
        api = ScriptedApi(step)
        with client(api) as http:
            assert http.post("/v1/chat/completions", json=BODY).json() == {"error": {}}
        assert len(api.requests) == 1


def test_the_last_error_is_raised_when_patience_ends() -> None:
    """When nothing comes for so long, the client sees the last error or refusal as it is."""
    with client(ScriptedApi(*[unreachable] * 99), patience=0.2) as http, pytest.raises(httpx.ConnectError):
        http.post("/v1/chat/completions", json=BODY)
    with client(ScriptedApi(*[refuse(503)] * 99), patience=0.2) as http:
        assert http.post("/v1/chat/completions", json=BODY).status_code == 503
    with client(ScriptedApi(cut(60), refuse(400))) as http, pytest.raises(ResumeRefused, match=r"r:0\.2.*400"):
        http.post("/v1/chat/completions", json=BODY)


def test_events_without_ids_are_never_repeated() -> None:
    """A cut in a stream that has no places is an error: to send the request again would repeat what was shown."""
    api = ScriptedApi(lambda _: stream(b'data: {"n": 0}\n\n', True))
    with pytest.raises(httpx.ReadError, match="cut"):
        read(api)
    assert len(api.requests) == 1


def test_an_error_for_good_ends_the_stream() -> None:
    """A failure of the answer itself is passed on and not asked for again."""
    failure = b'id: r:1.3\ndata: {"error":{"message":"x","code":"generation_failed"}}\n\n'
    api = ScriptedApi(lambda _: stream(failure, True))
    assert read(api) == failure
    assert len(api.requests) == 1


def test_leaving_cancels_and_a_client_s_own_policy_stands() -> None:
    """A stream that is closed early is cancelled by name, unless the client chose its own key or policy."""
    for body, headers, methods in (
        (BODY, {}, ["POST", "DELETE"]),
        (BODY | {"on_disconnect": 5}, {}, ["POST"]),
        (BODY, {"idempotency-key": "mine"}, ["POST"]),
    ):
        api = ScriptedApi()
        with client(api) as http, http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            next(response.iter_raw())
        assert [request.method for request in api.requests] == methods
        key = api.requests[0].headers["idempotency-key"]
        assert key and key == headers.get("idempotency-key", key)


def test_everything_else_passes_through() -> None:
    """A GET, or a POST that is no JSON, is sent once and as it is."""
    for method, request in (("GET", {}), ("POST", {"content": b"x", "headers": {"content-type": "text/plain"}})):
        api = ScriptedApi(refuse(503))
        with client(api) as http:
            assert http.request(method, "/ready", **request).status_code == 503
        assert len(api.requests) == 1 and "idempotency-key" not in api.requests[0].headers


def test_an_answer_that_is_not_streamed() -> None:
    """Cut in the middle of its body, it is fetched again whole under the same key."""
    answer = json.dumps({"choices": [1]}).encode()

    def half(_: bytes) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "application/json"}, stream=Cut(answer[:5], True))

    api = ScriptedApi(half, lambda _: httpx.Response(200, content=answer))
    with client(api) as http:
        assert http.post("/v1/chat/completions", json={"messages": []}).json() == {"choices": [1]}
    assert len({request.headers["idempotency-key"] for request in api.requests}) == 1


@pytest.mark.parametrize("name", ["message_stop", "response.completed", "response.incomplete", "response.failed"])
def test_the_end_of_a_stream_without_done(name: str) -> None:
    """Messages and responses end with an event of their own, after which nothing is asked for again."""
    end = f'event: {name}\nid: r:3.1\ndata: {{"type":"{name}"}}\n\n'.encode()
    api = ScriptedApi(lambda _: stream(end, True))
    assert read(api) == end
    assert len(api.requests) == 1


@pytest.mark.parametrize(
    "goes",
    [
        b'event: error\ndata: {"type":"error","error":{"type":"x","message":"resume","code":"stream_interrupted"}}\n\n',
        b'event: error\ndata: {"type":"error","code":"stream_interrupted","message":"resume","param":null}\n\n',
    ],
    ids=["messages", "responses"],
)
def test_a_server_that_goes_says_so_in_the_shape_of_the_stream(goes: bytes) -> None:
    """Whichever API it is, the client does not see it, and another process goes on."""
    api = ScriptedApi(lambda data: stream(data[: WHOLE.index(b"id: r:2.1")] + goes))
    assert events_of(read(api, "http://b")) == events_of(WHOLE)
    assert len(api.requests) == 2


def test_it_can_be_used_without_the_rest_of_furrow() -> None:
    """On a client's machine neither torch nor a web framework is needed: it is plain Python on httpx."""
    code = (
        "import sys, ops.client; "
        "print({'torch', 'litestar', 'redis', 'msgspec', 'control', 'api', 'worker'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
