"""Programs that nobody here wrote, each in its own environment, on the shared farm."""

from __future__ import annotations

import pytest

from ops.compat import environments
from ops.compat.clients import CLIENTS, Client
from ops.compat.runs import run
from ops.compat.samples import CHECK, judged
from tests.farm import Farm


@pytest.mark.timeout(330)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client(farm: Farm, client: Client) -> None:
    """Every check works but those that the page tells as gaps; what is listed as a gap does fail."""
    if (why := environments.missing(client)) is not None:
        pytest.skip(why)
    done = judged(client, lambda samples: run(client, farm.base_url, "demo", samples=samples))
    assert done.faults == []
    assert (CHECK in [result.check for result in done.results]) == (client.name == "lm-eval")
