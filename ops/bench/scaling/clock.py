"""The server's own clock: how long its thread worked on a call, whatever else the machine did meanwhile."""

from __future__ import annotations

from typing import TypeVar

from control.clients import SyncRedis
from control.connection import Call, Steps, run

T = TypeVar("T")


class ServerClock:
    """Runs calls one at a time and notes in `spent` what each took, in ms.

    The lower of two bounds counts. One is how long the server's main thread worked meanwhile: it includes chores, such
    as the fork that rewrites the append-only file. The other is the slow log's: it includes waits for a busy processor.
    """

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        client.config_set("slowlog-log-slower-than", 0)
        self.spent: list[float] = []

    def run(self, call: Call[T]) -> T:
        before = self._ms()
        answer = run(self._client, call)
        worked = self._ms() - before
        self.spent.append(min(worked, self._logged()))
        return answer

    def run_steps(self, steps: Steps[T]) -> T:
        """Each call of them is measured by itself."""
        try:
            call = next(steps)
            while True:
                call = steps.send(None if call is None else self.run(call))
        except StopIteration as end:
            return end.value

    def _ms(self) -> float:
        used = self._client.info("cpu")
        return 1000 * (used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])

    def _logged(self) -> float:
        """The last command but the INFO after it."""
        return self._client.slowlog_get(2)[1]["duration"] / 1000

    def close(self) -> None:
        """Log no more."""
        self._client.config_set("slowlog-log-slower-than", -1)
