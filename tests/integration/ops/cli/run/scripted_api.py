"""An API with one model that answers as a script says: for conversations without a farm."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["One", " two", "\x1b[2J three", " four."]


class ScriptedApi:
    """`paths` were asked for; each POST of a conversation is answered by the next of `answers`, the last one again:
    `whole`, `cut` (the connection ends in the middle), `slow` (it does not end before it is cancelled), `refused`,
    `queued` (it waits first)."""

    def __init__(self) -> None:
        self.answers = ["whole"]
        self.template: str | None = "x"
        self.kind = "generate"
        self.states: dict[str, list[str]] = {"m": ["loaded"]}
        """Each model's states, one after the other, the last one again; a number is the status of a refusal."""
        self.operator = False
        self.fails = False
        """A model that an operator loads ends as failed."""
        self.refuses: tuple[str, ...] = ()
        """Paths that are answered with 503."""
        self.loaded: list[dict[str, Any]] = []
        self.unloaded: list[str] = []
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.resumed: list[str | None] = []
        self.keys: set[str | None] = set()
        self.cancelled = threading.Event()
        self.url = ""

    def next_answer(self) -> str:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Handler(BaseHTTPRequestHandler):
    """Answers for `api`."""

    api: ScriptedApi

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.api.paths.append(f"GET {self.path}")
        self.api.keys.add(self.headers.get("authorization"))
        if self.path in self.api.refuses:
            self._json(503, {"error": {"message": "no Redis"}})
        elif self.path.startswith("/tokenizer_info"):
            self._json(200, {"chat_template": self.api.template, "generation_config": {}})
        elif (states := self.api.states.get(self.path.removeprefix("/v1/models/"))) is not None:
            state = states.pop(0) if len(states) > 1 else states[0]
            if state.isdigit():
                self._json(int(state), {"error": {"message": "no farm"}})
                return
            self._json(200, {"kind": self.api.kind, "state": state, "detail": "rank 0", "max_model_len": 64})
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": "m"}]})
        else:
            self._json(404, {"error": {"message": "no such model"}})

    def do_DELETE(self) -> None:
        self.api.paths.append(f"DELETE {self.path}")
        self.api.cancelled.set()
        self._json(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.startswith("/farm") and self.api.operator:
            if self.path in self.api.refuses:
                self._json(503, {"error": {"message": "no Redis"}})
                return
            if self.path.endswith("/unload"):
                self.api.unloaded.append(body["model"])
            else:
                self.api.loaded.append(body)
                self.api.states[body["name"]] = ["loading", "failed" if self.api.fails else "loaded"]
            self._json(200, {})
            return
        if self.path.startswith("/farm"):
            self._json(403, {"error": {"message": "not an operator"}})
            return
        self.api.bodies.append(body)
        self.api.resumed.append(self.headers.get("last-event-id"))
        answer = self.api.next_answer()
        if answer == "refused":
            self._json(400, {"error": {"message": "too \x1b[31mhot"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-request-id", "rid")
        self.end_headers()
        self._stream(answer, "prompt" in body)

    def _stream(self, answer: str, completion: bool) -> None:
        for place in (b"7, expected wait 4200 ms", b"2") if answer == "queued" else ():
            self.wfile.write(b": queue position %s\n" % place)
            self.wfile.flush()
            time.sleep(0.3)
        had = int((self.headers.get("last-event-id") or "rid:0.1").partition(":")[2].partition(".")[0])
        for seq, word in list(enumerate(WORDS, 1))[had:]:
            part = {"text": word} if completion else {"delta": {"content": word}}
            self._event(f"rid:{seq}.1", {"choices": [{"index": 0, "finish_reason": None, **part}]})
            if answer == "cut" and seq == 2:
                return
            while answer == "slow" and seq == 2:
                if self.api.cancelled.wait(0.01):
                    return
        end = {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]}
        self._event("rid:5.1", end | {"usage": {"prompt_tokens": 3, "completion_tokens": len(WORDS)}})
        self.wfile.write(b"id: rid:5.2\ndata: [DONE]\n\n")

    def _event(self, place: str, data: Any) -> None:
        self.wfile.write(f"id: {place}\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()
        time.sleep(0.01)

    def _json(self, status: int, data: Any) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def scripted_api() -> Generator[ScriptedApi]:
    api = ScriptedApi()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"api": api}))
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield api
    finally:
        api.cancelled.set()
        server.shutdown()
        thread.join()
        server.server_close()
