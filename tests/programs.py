"""Programs and packages that tests need and a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def absent(name: str, reason: str) -> NoReturn:
    """Skip the test; fail it in CI, unless .ci/run could not install `name` and said so."""
    if os.environ.get("CI") == "true" and name not in os.environ.get("FURROW_LEFT_OUT", "").split():
        pytest.fail(reason)
    pytest.skip(reason)
