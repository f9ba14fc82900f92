"""Checks of an API by its URL, as clients meet it: answer, certificate, version, readiness, and buffering proxies."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from control.errors import SettingsError
from control.operations.checks.findings import Checks, Finding, worst
from control.version import VERSION
from ops.cli.doctor.redis_server import check_certificate
from ops.client.events import parsed

WITHIN_S = 10.0
HELD_BACK = 0.5
"""Events that come within this part of the time in which they were sent were held back."""
JUDGED_S = 0.1
"""Events that were sent within less time tell nothing: their times are in whole milliseconds."""

Body = TypeVar("Body")


class Unexpected(Exception):
    """An answer that is none of Furrow's API."""


def check_api(url: str) -> list[Finding]:
    """Raises SettingsError for a URL that can't be read."""
    parts = _parts(url)
    checks = Checks("api", f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}")
    trusted = ssl.create_default_context()
    if parts.scheme == "https":
        check_certificate((parts.hostname or "", parts.port or 443), trusted, checks)
        if worst(checks.findings) == "error":
            return checks.findings
    try:
        server = ApiServer(parts, trusted)
        for check in (check_answer, check_ready, check_stream):
            check(server, checks)
    except (httpx.InvalidURL, UnicodeError) as error:  # a host that IDNA refuses, a control character, a URL too long
        checks.error("url", f"the URL can't be used: {error}", "Give the URL of `furrow api`, http://HOST:PORT.")
    except httpx.HTTPError as error:
        remedy = "Check that `furrow api` runs and that the URL names it, or the proxy before it."
        checks.error("answer", f"it does not answer: {str(error) or type(error).__name__}", remedy)
    except Unexpected as error:
        remedy = "Give the URL of `furrow api`, or let the proxy pass /version, /ready and /health to it."
        checks.error("answer", str(error), remedy)
    return checks.findings


class ApiServer:
    """Sends one request a connection."""

    def __init__(self, parts: SplitResult, trusted: ssl.SSLContext) -> None:
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._http = httpx.Client(
            base_url=place + parts.path.rstrip("/").removesuffix("/v1"),
            verify=trusted,
            timeout=WITHIN_S,
            trust_env=False,
            headers={"user-agent": f"furrow-doctor/{VERSION}", "accept-encoding": "identity"},
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def events(self, path: str) -> Iterator[tuple[float, bytes]]:
        """The time at which each event came, in seconds, and its data. Raises Unexpected for another answer."""
        with self._http.stream("GET", path) as response:
            if response.status_code != 200:
                raise Unexpected(f"GET {path} is answered with HTTP {response.status_code}")
            try:
                for event in parsed(response.iter_raw()):
                    if event.data:  # no comment
                        yield time.monotonic(), event.data
            except UnicodeDecodeError:
                raise Unexpected(f"the stream of GET {path} is not Furrow's") from None


class _Version(msgspec.Struct):
    version: str


class _Ready(msgspec.Struct):
    ready: bool
    reason: str | None = None


class _Probe(msgspec.Struct):
    at_ms: int


def _decoded(data: bytes, body: type[Body], other: str) -> Body:
    """Raises Unexpected with the text `other`."""
    try:
        return msgspec.json.decode(data, type=body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unexpected(other) from None


def check_answer(server: ApiServer, checks: Checks) -> None:
    answer = server.get("/v1/version")
    other = f"GET /v1/version is answered with HTTP {answer.status_code}, not by Furrow"
    version = _decoded(answer.content, _Version, other).version
    remedy = "Install one version everywhere, and restart the API processes one by one."
    same = version == VERSION
    message = f"Furrow {version}" + ("" if same else f"; this command is {VERSION}")
    checks.judge("ok" if same else "warning", "version", message, remedy)


def check_ready(server: ApiServer, checks: Checks) -> None:
    answer = server.get("/v1/ready")
    other = f"GET /v1/ready is answered with HTTP {answer.status_code}, not by Furrow"
    ready = _decoded(answer.content, _Ready, other)
    remedy = "Mend what is found above about Redis, hosts and models; without findings wait until the model is loaded."
    if ready.ready:
        checks.ok("ready", "a model serves")
    else:
        checks.error("ready", f"it answers 503: {ready.reason}", remedy)


def check_stream(server: ApiServer, checks: Checks) -> None:
    """A short stream of the API process itself; one that came at once is measured again, as this host may be busy."""
    took, should = _measured(server)
    if _held_back(took, should):
        took, should = _measured(server)
    if _held_back(took, should):
        message = f"a proxy holds streams back: events of {should:.1f} s came within {took:.1f} s"
        remedy = (
            "Turn off buffering in it: `proxy_buffering off` and `proxy_http_version 1.1` in nginx, `flush_interval "
            "-1` in Caddy, no compression of text/event-stream."
        )
        checks.error("stream", message, remedy)
    else:
        checks.ok("stream", "events come as they are sent")


def _held_back(took: float, should: float) -> bool:
    return should >= JUDGED_S and took < HELD_BACK * should


def _measured(server: ApiServer) -> tuple[float, float]:
    """Seconds in which the events came, and in which they were sent; each has the time of its sending."""
    came: list[float] = []
    sent: list[int] = []
    for at, data in server.events("/v1/health/stream"):
        came.append(at)
        sent.append(_decoded(data, _Probe, "the stream of GET /v1/health/stream is not Furrow's").at_ms)
    if len(came) < 2:
        raise Unexpected("a stream ends before its second event")
    return came[-1] - came[0], (sent[-1] - sent[0]) / 1000


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        (parts.hostname or "").encode("idna")
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or 0) >= 0 and parts.path.isascii():
            return parts
    except ValueError:  # UnicodeError included: a part of the name is empty or too long
        pass
    raise SettingsError("--url is no address of an API: write http://HOST:PORT or https://HOST")
