"""Paths are the same with and without /v1."""

from __future__ import annotations

import time

import pytest

from api.app import ROUTES, create_app
from api.http.middleware import canonical
from api.settings import ApiSettings


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/models/v1/x", "/v1/models/v1/x"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health", "/health"),
        ("/v2/rerank", "/v1/rerank"),
        ("/v1/v2/embed", "/v2/embed"),
        ("/v2/models", "/v2/models"),
        ("/v1/score", "/score"),
        ("/v1/api/chat", "/api/chat"),
        ("/v1/farm/models", "/v1/farm/models"),
        ("/v1", "/v1"),
        ("/v1/", "/v1/"),
        ("/", "/"),
        ("", ""),
        ("/v10/models", "/v10/models"),
        ("/modelsx", "/modelsx"),
        ("/v1//chat/completions", "/v1//chat/completions"),
    ],
)
def test_each_path_has_one_route(path: str, route: str) -> None:
    """A prefix too few or too many is mended where the route is known; other paths stay, and are a 404."""
    assert canonical(path) == route
    assert canonical(route) == route


def test_a_path_of_many_prefixes_costs_no_more_than_its_length() -> None:
    """A head may have 64 KiB: its path is read once."""
    began = time.perf_counter()
    assert canonical("/v1" * 200_000 + "/models") == "/v1/models"
    assert time.perf_counter() - began < 1


def test_every_route_is_known() -> None:
    """A new route fails here until its first part is in the lists."""
    app = create_app(ApiSettings(redis_url="redis://127.0.0.1:1"))
    assert ROUTES
    for route in app.routes:
        if route.path == "/" or route.path.startswith(("/farm", "/schema", "/docs", "/console")):
            continue
        other = route.path.removeprefix("/v1") if route.path.startswith("/v1/") else f"/v1{route.path}"
        assert (canonical(route.path), canonical(other)) == (route.path, route.path)
