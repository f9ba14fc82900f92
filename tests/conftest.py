"""Servers that the whole run shares. Whoever takes one empties it first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import NEW, OLD, Server, serving


@pytest.fixture(scope="session")
def old_server() -> Iterator[Server]:
    with serving(OLD) as server:
        yield server


@pytest.fixture(scope="session")
def new_server() -> Iterator[Server]:
    with serving(NEW) as server:
        yield server
