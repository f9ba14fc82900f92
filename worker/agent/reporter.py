"""The agent's reports on the replicas of its host, as the farm and the operator read them."""

from __future__ import annotations

from control.messages import Assignment
from control.redis.clients import SyncRedis
from control.replicas import health
from control.replicas.health import AgentState, Status
from worker.repository.downloaded import Downloaded


class Reporter:
    """Writes the status of replicas. Every method raises RedisUnavailable."""

    def __init__(self, client: SyncRedis, host_id: str) -> None:
        self._client, self._host_id = client, host_id

    def report(
        self,
        model: str,
        replica: str,
        state: AgentState,
        detail: str,
        assignment: Assignment | None = None,
        download: Downloaded | None = None,
    ) -> None:
        """Write the state of a replica; `assignment` tells how many of its ranks this host runs."""
        ranks = len(assignment.ranks) if assignment else 0
        done, total = (download.done, download.total) if download is not None else (0, 0)
        fields = {"host": self._host_id, "tp": ranks, "downloaded_bytes": done, "download_bytes": total}
        health.write_status(self._client, model, replica, state, detail, **fields)

    def repeat_failure(self, assignment: Assignment, why: str, status: Status | None) -> None:
        """Write again that the replica was given up, where Redis lost it: its requests would wait without an end."""
        if status is None or status.state != "failed":
            self.report(assignment.spec.name, assignment.replica, "failed", why, assignment)
