"""What `furrow serve` makes of a data folder that an earlier run has left."""

from __future__ import annotations

from contextlib import closing

from control.messages import Assignment, ModelSpec
from control.placement import farm
from control.placement.placement import Host
from control.records import catalog
from control.redis.connection import connect
from ops.cli.serve import desire
from tests.servers import Server

OLD, NEW = ModelSpec(name="old", source="/old"), ModelSpec(name="new", source="/new")


def test_only_what_is_served_now_is_started(new_server: Server) -> None:
    """On a private server an earlier model goes with its assignments; on a shared one it is somebody else's."""
    with closing(connect(new_server.url)) as client:
        client.flushall()
        farm.beat_host(client, Host("one", ("cpu",)), 1, 1)
        for spec in (OLD, NEW):
            catalog.put_spec(client, spec)
            farm.assign(client, "one", Assignment(spec=spec, replica="r0", ranks=[0], devices=["cpu"]))
        desire(client, NEW, alone=False)
        assert len(catalog.list_specs(client)) == len(farm.assignments(client, "one")) == 2
        desire(client, NEW, alone=True)
        assert [spec.name for spec in catalog.list_specs(client)] == ["new"]
        assert [assignment.spec.name for assignment in farm.assignments(client, "one")] == ["new"]
