"""The HTTP server of an agent for /metrics and /health, on threads of its own."""

from __future__ import annotations

import gzip
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest

from control.errors import SettingsError

DEFAULT_ADDRESS = "127.0.0.1:9464"
OFF = "off"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""For every client: prometheus_client 0.26 writes `vllm_` for `vllm:` as OpenMetrics, which Prometheus prefers."""
READ_LIMIT_S = 5.0
"""A client that does not send its request within this time is disconnected."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128
    """With socketserver's five, clients that connect at the same moment wait for a second or more."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is no error of this process."""


class _Handler(WSGIRequestHandler):
    timeout = READ_LIMIT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each scrape."""

    def address_string(self) -> str:
        return str(self.client_address[0])


class MetricsServer:
    """Serves until the process ends."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], dict[str, Any]]) -> None:
        """`health`: the body of /health; without `ok` its status is 503. Raises OSError for a port in use."""
        self._health = health
        self._registry = registry
        self._server = make_server(host, port, self._answer, server_class=_Server, handler_class=_Handler)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._stopping = False

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop at once: a connection wakes the thread. `serve_forever` would look for its end every half second."""
        self._stopping = True
        address: Any = self._server.server_address
        with suppress(OSError):
            socket.create_connection(address, READ_LIMIT_S).close()
        self._thread.join()
        self._server.server_close()

    def _run(self) -> None:
        while not self._stopping:
            self._server.handle_request()

    def _answer(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        method = environment.get("REQUEST_METHOD", "")
        if method not in ("GET", "HEAD"):
            return _text(start, "405 Method Not Allowed", "Only GET is answered here.")
        if path == "/metrics":
            return self._metrics(environment, start)
        if path == "/health":
            body = self._health()
            status = "200 OK" if body.get("ok") else "503 Service Unavailable"
            start(status, [("content-type", "application/json")])
            return [json.dumps(body).encode()]
        return _text(start, "404 Not Found", "This agent serves /metrics and /health.")

    def _metrics(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = generate_latest(self._registry)
        headers = [("content-type", CONTENT_TYPE)]
        if "gzip" in environment.get("HTTP_ACCEPT_ENCODING", ""):
            body, headers = gzip.compress(body, compresslevel=1), [*headers, ("content-encoding", "gzip")]
        start("200 OK", [*headers, ("content-length", str(len(body)))])
        return [body]


def _text(start: Callable[..., Any], status: str, words: str) -> list[bytes]:
    start(status, [("content-type", "text/plain; charset=utf-8")])
    return [f"{words}\n".encode()]


def parse_address(text: str) -> tuple[str, int] | None:
    """`HOST:PORT`, or None for `off`. Raises SettingsError."""
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(f"--metrics {text!r} is no address: use HOST:PORT such as {DEFAULT_ADDRESS}, or {OFF}")
    return host.removeprefix("[").removesuffix("]"), int(port)
