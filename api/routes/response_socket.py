"""The WebSocket of /v1/responses: each message `response.create` is served as a POST of its body with the headers of
the handshake, and the events of its stream are messages.

So keys, limits, turns and the queue hold for each response as for any other request. One response runs at a time;
messages that come meanwhile wait. The last response can be continued by its id although it was not stored: this
connection keeps its items.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from litestar.datastructures import Headers
from litestar.types import ASGIApp

from api.http.connection import Client, Upgrade, set_client
from api.http.gate import secret_of
from api.http.middleware import canonical
from api.http.websocket import GOING_AWAY, WebSocket
from api.process import Process

PATH = "/v1/responses"
_LEFT_OUT = frozenset(
    (b"connection", b"upgrade", b"content-length", b"content-type", b"transfer-encoding", b"last-event-id")
)
"""Headers of a handshake that are none of its responses' requests."""
_NO_PREVIOUS = "previous_response_not_found"
"""OpenAI's code, after which clients send the whole conversation again."""
_IMPLIED = {"stream": True, "background": None}


class ResponseSockets:
    """The WebSockets of an API process."""

    def __init__(self, app: ASGIApp, process: Process) -> None:
        """`app` serves HTTP, with all that a request passes before its route."""
        self._app = app
        self._process = process

    def takes(self, path: str) -> bool:
        return canonical(path) == PATH

    def most_bytes(self) -> int:
        return self._process.models.most_text_bytes

    async def admit(self, upgrade: Upgrade) -> None:
        """Raises as a request by HTTP: each response's request is checked again, as keys end."""
        process = self._process
        process.shutdown.refuse_when_draining()
        headers = Headers.from_scope(cast(Any, upgrade.scope))
        process.origins.check("POST", headers)
        await process.gate.identify(secret_of(upgrade.scope["headers"]))

    async def serve(self, upgrade: Upgrade, socket: WebSocket) -> None:
        await ResponseSocket(self._app, upgrade, socket, self.most_bytes()).run()


@dataclass(slots=True)
class LastItems:
    """The items of the last response and of what came before it, where it was not stored."""

    id: str = ""
    items: list[Any] = field(default_factory=list[Any])


class ResponseSocket:
    """The conversation on one connection."""

    def __init__(self, app: ASGIApp, upgrade: Upgrade, socket: WebSocket, most_bytes: int) -> None:
        """`app` serves HTTP. `most_bytes`: bytes of the items that are kept of a response that is not stored."""
        self._app = app
        self._upgrade = upgrade
        self._socket = socket
        self._most_bytes = most_bytes
        self._last = LastItems()

    async def run(self) -> None:
        """Serve messages until the connection closes."""
        while (message := await self._socket.receive()) is not None:
            await self._serve(message)
            if self._upgrade.draining():
                self._socket.close(GOING_AWAY, "this API process is shutting down")

    async def _serve(self, message: str) -> None:
        try:
            body = msgspec.json.decode(message, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            await self._refuse("invalid_json", f"The message is no JSON object: {error}.", None)
            return
        kind = body.pop("type", None)
        if kind != "response.create":
            text = f"Invalid value for 'type': {str(kind)[:80]!r}; send 'response.create'."
            await self._refuse("invalid_type", text, "type")
            return
        if body.pop("generate", True) is False:
            text = (
                "'generate': false is not supported by this server: nothing has to be prepared. Send the first input."
            )
            await self._refuse("unsupported_parameter", text, "generate")
            return
        if body.get("background"):
            text = "'background' is not served on a WebSocket. Leave it out, or send the request by HTTP."
            await self._refuse("unsupported_parameter", text, "background")
            return
        self._continue(body)
        await self._respond(body | _IMPLIED)

    def _continue(self, body: dict[str, Any]) -> None:
        """Put the items of the last response before the input that goes on from it, where it was not stored."""
        previous = body.get("previous_response_id")
        if self._last.items and previous == self._last.id:
            body["previous_response_id"] = None
            body["input"] = [*self._last.items, *_items(body.get("input"))]

    async def _respond(self, body: dict[str, Any]) -> None:
        answer = _Exchange(self._socket, msgspec.json.encode(body))
        self._socket.on_close = answer.leave
        try:
            await self._app(self._scope(answer), answer.receive, answer.send)
        finally:
            self._socket.on_close = None
        self._keep(body, answer.last)

    def _keep(self, body: dict[str, Any], last: bytes) -> None:
        """Remember the items of a response that nobody else keeps."""
        self._last = LastItems()
        if body.get("store") is not False or not last.startswith(b'{"type":"response.completed"'):
            return
        response = msgspec.json.decode(last)["response"]
        items = [*_items(body.get("input")), *response["output"]]
        if len(msgspec.json.encode(items)) <= self._most_bytes:
            self._last = LastItems(response["id"], items)

    def _scope(self, answer: _Exchange) -> Any:
        scope: dict[str, Any] = {
            **self._upgrade.scope,
            "type": "http",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "headers": [
                *(
                    (name, value)
                    for name, value in self._upgrade.scope["headers"]
                    if name not in _LEFT_OUT and not name.startswith(b"sec-websocket-")
                ),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(answer.body)).encode()),
            ],
            "state": dict(self._upgrade.scope["state"]),
        }
        set_client(scope, answer.client)
        return scope

    async def _refuse(self, code: str, text: str, param: str | None) -> None:
        error = {"message": text, "type": "invalid_request_error", "param": param, "code": code}
        await self._socket.send(msgspec.json.encode({"type": "error", "status": 400, "error": error}))


def _items(value: Any) -> list[Any]:
    """An input as a list of items."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return cast("list[Any]", value) if isinstance(value, list) else []


class _Exchange:
    """One response's request, as its handler sees it, and its answer as messages."""

    def __init__(self, socket: WebSocket, body: bytes) -> None:
        self._socket = socket
        self.body = body
        self.client = Client()
        self._left = asyncio.Event()
        self._gave_body = False
        self._status = 200
        self._rest = b""
        self.last = b""
        """The data of the last event."""

    async def receive(self) -> Any:
        """The body, then the client's leaving."""
        if not self._gave_body:
            self._gave_body = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        """The client has left."""
        self.client.leave()
        self._left.set()

    async def send(self, message: Any) -> None:
        """A part of the answer: each whole event is sent."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self._rest += message.get("body", b"")
        if self._status == 200:
            await self._send_events()
        elif not message.get("more_body", False):
            error = msgspec.json.decode(self._rest).get("error") or {}
            if error.get("param") == "previous_response_id" and self._status == 404:
                error["code"] = _NO_PREVIOUS
            await self._socket.send(msgspec.json.encode({"type": "error", "status": self._status, "error": error}))

    async def _send_events(self) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self.last = line[6:]
                await self._socket.send(self.last)
            elif line.startswith(b":"):
                self._socket.ping()
