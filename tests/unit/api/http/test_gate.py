"""Allowed origins and hosts where no key is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from litestar.datastructures import Headers

from api.http.errors import Forbidden
from api.http.gate import OriginCheck, is_local_name, is_same_origin, proxy_header
from api.settings import ApiSettings


def refusal(method: str = "POST", settings: Any = None, **headers: str) -> str | None:
    """The code with which a request is refused; None for one that is taken."""
    options = ApiSettings(redis_url="", **(settings or {}))
    check = OriginCheck(asks_for_key=options.asks_for_key, cors_origins=options.cors_origins, host=options.host)
    try:
        check.check(method, Headers({name.replace("_", "-"): value for name, value in headers.items()}))
    except Forbidden as error:
        return error.code
    return None


LOCAL = {"host": "localhost:8000"}


@pytest.mark.parametrize(
    "headers",
    [
        LOCAL,
        {},
        {"host": "127.0.0.1"},
        {"host": "[::1]:8000"},
        {"host": "host.docker.internal:8000"},
        {**LOCAL, "origin": "http://localhost:8000"},
        {"host": "localhost", "origin": "http://localhost:80"},
        {**LOCAL, "sec_fetch_site": "same-origin"},
    ],
)
def test_own_pages_and_programs_are_served(headers: dict[str, str]) -> None:
    assert refusal(**headers) is None


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost:3000", "app://chat", "vscode-webview://x", "file://", "x", ""],
)
def test_a_foreign_page_is_refused(origin: str) -> None:
    """For every method: what a page can send without asking first has any method that forms have."""
    assert refusal(**LOCAL, origin=origin) == "foreign_origin"
    assert refusal("GET", **LOCAL, origin=origin) == "foreign_origin"


def test_a_cross_site_form_without_origin_is_refused() -> None:
    """A link from elsewhere (GET) opens the documentation; it makes no work."""
    assert refusal(**LOCAL, sec_fetch_site="cross-site") == "foreign_origin"
    assert refusal("GET", **LOCAL, sec_fetch_site="cross-site") is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "8.8.8.8", "[::2]", "["]
)
def test_a_name_that_was_pointed_here_is_refused(host: str) -> None:
    """Also where the page's origin is the same name, which is what DNS rebinding makes of it."""
    assert refusal(host=host) == "foreign_host"
    assert refusal(host=host, origin=f"http://{host}") == "foreign_host"


@pytest.mark.parametrize("origin", ["https://friend.example", "app://chat", "null"])
def test_a_named_origin_is_served(origin: str) -> None:
    settings = {"cors_origins": (origin,)}
    assert refusal(settings=settings, **LOCAL, origin=origin) is None
    assert refusal(settings=settings, **LOCAL, origin="https://evil.example") == "foreign_origin"


def test_a_named_origin_names_its_host() -> None:
    """A proxy on this machine may pass its own name on."""
    settings = {"cors_origins": ("https://friend.example",)}
    assert refusal(settings=settings, host="friend.example", origin="https://friend.example") is None
    assert refusal(settings=settings, host="evil.example") == "foreign_host"


@pytest.mark.parametrize("settings", [{"cors_origins": ("*",)}, {"require_keys": True}, {"api_keys": ("k",)}])
def test_with_every_page_or_a_key_nothing_is_refused(settings: dict[str, Any]) -> None:
    """A page does not know a key, and can't send one without the browser's question before."""
    assert refusal(settings=settings, host="evil.example", origin="https://evil.example") is None


def test_beyond_loopback_a_host_may_have_any_name() -> None:
    settings = {"host": "0.0.0.0"}
    assert refusal(settings=settings, host="farm.example", origin="https://farm.example") is None
    assert refusal(settings=settings, host="farm.example", origin="https://evil.example") == "foreign_origin"


def test_an_origin_is_split_into_its_parts() -> None:
    assert is_same_origin("https://a:8443", "A:8443") and not is_same_origin("https://a", "a:8443")
    assert not is_same_origin("http://a:x", "a") and not is_same_origin("app://a", "a")
    assert is_local_name("model.localhost") and not is_local_name("localhost.example")
    assert proxy_header(Headers({"x-forwarded-for": "1.2.3.4"})) == "x-forwarded-for"
    assert proxy_header(Headers({"accept": "*/*"})) is None
