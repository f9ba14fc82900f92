"""Third-party clients work: programs that nobody here wrote, each in its own environment, on the shared farm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from ops.compat import clients
from ops.compat.clients import CLIENTS, Client
from ops.compat.leader_faults import KEEP_ALIVE_S, leader_faults
from ops.compat.runs import CHECK, judged, run
from ops.compat.scripted import DEMONSTRATION, FORMS, scripted_farm
from tests.farm import Farm
from tests.integration.api.conftest import ApiProcess, running_api


@pytest.fixture(scope="module")
def impatient(shared_farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    """An API process of the farm that sends a comment after a short silence."""
    options = ("--keep-alive", str(KEEP_ALIVE_S))
    with running_api(shared_farm.redis_url, tmp_path_factory.mktemp("api"), *options) as process:
        yield process


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an API whose model answers by orders."""
    with scripted_farm("demo", tmp_path_factory.mktemp("scripted")) as url:
        yield f"{url}/v1"


def _agent(client: Client) -> ParameterSet:
    """Skipped before a farm is started where the agent can't be run."""
    why = clients.missing(client)
    return pytest.param(client, id=client.name, marks=pytest.mark.skipif(why is not None, reason=why or ""))


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest) -> str:
    """The form that is the parameter."""
    return request.param


@pytest.fixture(scope="module")
def form_url(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an API whose model answers by orders, in the form."""
    with scripted_farm("demo", tmp_path_factory.mktemp("form"), form=form) as url:
        yield f"{url}/v1"


@pytest.mark.timeout(630)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_passes_all_checks_but_its_listed_gaps(
    farm: Farm, impatient: ApiProcess, client: Client, request: pytest.FixtureRequest
) -> None:
    """Every check works but those that the page tells as gaps; what is listed as a gap does fail."""
    if (why := clients.missing(client)) is not None:
        pytest.skip(why)
    url, scripted_url = f"{impatient.url}/v1", request.getfixturevalue("scripted")
    with leader_faults(farm.redis_url, "demo") as fault_url:
        more = {"fault_url": fault_url, "scripted_url": scripted_url}
        done = judged(client, lambda samples: run(client, url, "demo", samples=samples, **more))
    assert done.faults == []
    assert (CHECK in [result.check for result in done.results]) == (client.name == "lm-eval")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", [name for name in FORMS if name != DEMONSTRATION], indirect=True)
@pytest.mark.parametrize("client", [_agent(client) for client in CLIENTS if client.orders])
def test_an_agent_runs_its_tool_loop_in_each_form(form: str, form_url: str, client: Client) -> None:
    """A call, its result and a second turn, with the agent's own prompts, on a model that writes as a family does."""
    done = run(client, form_url, "demo", scripted_url=form_url, form=form)
    assert [(result.check, result.detail) for result in done.results if not result.ok] == []
    assert done.results and all(result.check.startswith(f"{form}: ") for result in done.results)
