"""Both ways of carrying an exchange, where this machine has them."""

from __future__ import annotations

import platform

import pytest

from worker.collective import interpreted, native


@pytest.fixture(params=["native", "interpreted"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.library() is None:
        pytest.skip("no C++ compiler here")
    if request.param == "interpreted" and not interpreted.ordered():
        pytest.skip(f"{platform.machine()} does not keep the order of stores")
    return str(request.param)
