"""`furrow models load --wait` waits and reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from control.errors import RedisUnavailable
from ops.cli import models


class Farm:
    """A model whose state can't be read for some times; then it is served."""

    def __init__(self, outages: int) -> None:
        self.outages = outages

    def overview(self, client: Any, name: str) -> Any:
        if self.outages:
            self.outages -= 1
            raise RedisUnavailable("Redis does not answer")
        return SimpleNamespace(revision=1, rolled_out=1, wanted=1, replicas=[None], is_rolled_out=True)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    def living_hosts(client: Any) -> list[str]:
        return ["h"]

    monkeypatch.setattr(models.membership, "living_hosts", living_hosts)
    monkeypatch.setattr(models, "TICK_S", 0.001)
    return None


def test_a_wait_outlives_a_pause_of_redis(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    farm = Farm(outages=3)
    monkeypatch.setattr(models.model_overviews, "overview", farm.overview)
    models.wait_until_rolled_out(client, "m", None)
    output = capsys.readouterr()
    assert "Redis does not answer" in output.err and "1 of 1 replicas" in output.out + output.err


def test_its_time_limit_holds_without_redis(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.model_overviews, "overview", Farm(outages=1_000_000).overview)
    with pytest.raises(RedisUnavailable):
        models.wait_until_rolled_out(client, "m", 0.05)
