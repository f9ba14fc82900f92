"""Servers that the whole run shares; each test that uses one begins with it empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import NEW, Server, serving


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with serving(NEW) as server:
        yield server
