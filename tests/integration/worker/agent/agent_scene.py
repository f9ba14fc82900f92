"""An agent whose ranks are shell scripts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from control import keys
from control.messages import ModelSpec
from control.placement.placement import Host
from control.records import catalog
from control.replicas import health
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.waiting import until
from worker.agent.agent import Agent
from worker.agent.standby import Standby
from worker.agent.supervision.client import ChildProcess, SupervisorClient

HOST = "host"

SCRIPT = """#!/bin/sh
# In the place of python: what $FURROW_RANK does is what the file of its name says, else it waits to be told to stop.
# A standby dies at once unless there is a file of its name; then it imports for ever.
trap 'exit 0' TERM USR1
[ "$4" = compile ] && exit 0
[ "$4" = need ] && exec {python} "$@"
echo $$ >> {folder}/pids-${{FURROW_RANK:-standby}}
[ "$4" = standby ] && [ -e {folder}/standby ] && exec sleep 60
[ "$4" = standby ] && exit 1
[ "$4" = download ] && exec {python} "$@"
[ -e {folder}/exit-$FURROW_RANK ] && exit $(cat {folder}/exit-$FURROW_RANK)
while :; do [ -e {folder}/exit-$FURROW_RANK ] && exit $(cat {folder}/exit-$FURROW_RANK); sleep 0.02; done
"""


class AgentScene:
    """An agent in a thread; `exits` sets the status with which a rank ends at once."""

    def __init__(
        self,
        redis: ReplicaRedis,
        folder: Path,
        model: Path,
        supervisor: SupervisorClient,
        memory: int | None = None,
    ) -> None:
        self.redis, self.folder, self.model = redis, folder, model
        self.agent = Agent(
            redis.another(), redis.url, Host(HOST, memory=memory), supervisor, Standby(redis.url, supervisor)
        )
        self.thread = threading.Thread(target=self.agent.run, daemon=True)

    def want(self, **changes: Any) -> ModelSpec:
        """Make a model with two ranks the desired state, and let the agent run."""
        fields = {"name": MODEL, "source": str(self.model), "tp": 2, "devices": ["cpu", "cpu"]} | changes
        catalog.put_spec(self.redis.client, ModelSpec(**fields))
        if not self.thread.is_alive():
            self.thread.start()
        return self.spec

    @property
    def spec(self) -> ModelSpec:
        spec = catalog.get_spec(self.redis.client, MODEL)
        assert spec is not None
        return spec

    def exits(self, rank: int, status: int) -> None:
        (self.folder / f"exit-{rank}").write_text(str(status))

    def says(self, rank: int, pid: int, why: str) -> None:
        """The process's reason for its end, before it ends."""
        for call in health.note_end(MODEL, REPLICA, rank, health.EndReason(host=HOST, pid=pid, message=why)):
            self.redis.run(call)

    def pids(self, rank: int | str) -> list[int]:
        path = self.folder / f"pids-{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def process(self, rank: int) -> ChildProcess:
        """As the agent holds it; the process may say that it is there a little before that."""
        return until(lambda: self.agent.replicas.by_place[MODEL, REPLICA].processes.get(rank), 40.0)

    def standby(self) -> str | None:
        """The state of the standby, as the host reports it."""
        return self.redis.client.hget(keys.host(HOST), "standby")

    def status(self) -> dict[str, str]:
        return self.redis.client.hgetall(self.redis.keys.status)

    def stop(self) -> None:
        self.agent.stop()
        if self.thread.is_alive():
            self.thread.join(40)
        assert not self.thread.is_alive()
