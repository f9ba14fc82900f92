"""`furrow serve` once its processes are started: the desired state of its models, and the wait until they serve.

It imports the client of Redis, which takes as long as all that `ops.cli.serve` needs to start them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from control import access
from control.errors import ModelUnavailable, RedisUnavailable
from control.messages import ModelSpec
from control.operations.options import why_asked
from control.placement import farm
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health, model_overviews
from control.requests.upkeep.stranded import abandon
from ops.cli.progress import Stage, Waiting, stage_here
from ops.local.ready import is_ready

TICK_S = 0.1


def reminder_of_keys(client: SyncRedis, host: str, folder: Path | None) -> str:
    """The instruction to make the key that clients need; `folder` is the private server's."""
    option = f" --redis {shlex.quote(str(folder))}" if folder is not None else ""
    return why_asked(host, run(client, access.count()), option)


def desire(client: SyncRedis, specs: Sequence[ModelSpec], alone: bool) -> None:
    """Make `specs` the desired state; on a private server they replace all models of earlier runs."""
    names = {spec.name for spec in specs}
    if alone:
        for other in catalog.list_specs(client):
            if other.name not in names:
                abandon(client, other.name, f"the model '{other.name}' is not served any more")
                catalog.forget(client, other)
        # An assignment left behind would start its ranks again, and they would bring their specification back.
        for host, assignments in farm.all_assignments(client).items():
            for assignment in assignments:
                if assignment.spec.name not in names:
                    farm.remove_assignment(client, host, assignment.spec.name, assignment.replica)
        # A model on demand that ran when the run before ended is not to be loaded before its first request.
        run_every(client, [farm.forget_demand(spec.name) for spec in specs])
        for spec in specs:
            expected = {f"r{index}" for index in range(spec.replicas)}
            for replica in expected | run(client, catalog.replicas(spec.name)).keys():
                health.clear_status(client, spec.name, replica)
    for spec in specs:
        catalog.put_spec(client, spec)


def is_offered(overview: model_overviews.Overview) -> bool:
    """True if the model sleeps and its files have been read."""
    return overview.state == "sleeping" and overview.assets is not None


def wait_until_served(
    client: SyncRedis,
    specs: Sequence[ModelSpec],
    address: tuple[str, int],
    tend: Callable[[], None],
    is_stopping: Callable[[], bool],
) -> None:
    """Print the progress until every model is loaded and /ready is true. A Redis that does not answer is waited for, as
    the parts do. Raises ModelUnavailable if a model failed."""
    with Waiting(logs=True) as waiting:
        while not is_stopping():
            tend()
            try:
                overviews = [model_overviews.overview(client, spec.name) for spec in specs]
            except RedisUnavailable:
                waiting.show(Stage("Redis does not answer; waiting for it"))
                time.sleep(TICK_S)
                continue
            for overview in overviews:
                if overview.state == "failed":
                    raise ModelUnavailable(overview.model, "failed", overview.detail)
            missing = [overview for overview in overviews if overview.state != "loaded" and not is_offered(overview)]
            if not missing and is_ready(address):
                return
            waiting.show(stage_here(missing[0]) if missing else Stage("loaded; waiting for the API process"))
            time.sleep(TICK_S)
