"""One farm for each process of a run, shared by its files: the demonstration model on two ranks, in float64 so that
continuations are exact."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.farm import Farm, serving_farm


@pytest.fixture(scope="session")
def shared_farm() -> Iterator[Farm]:
    with serving_farm("demo", "--tp", "2", "--devices", "cpu", "--dtype", "float64") as farm:
        yield farm


@pytest.fixture
def farm(shared_farm: Farm) -> Farm:
    """The shared farm, whole again after whatever an earlier test did to it."""
    from tests.waiting import until

    until(shared_farm.ready)
    return shared_farm


@pytest.fixture
def client(farm: Farm) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=farm.base_url, api_key="none", max_retries=0) as client:
        yield client
