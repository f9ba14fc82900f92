"""The server's own clock: how long its thread worked on a call, whatever else the machine did meanwhile."""

from __future__ import annotations

from typing import TypeVar

from control.redis.clients import SyncRedis
from control.redis.connection import Call, Steps, read, run

T = TypeVar("T")

_LOOP = "local x = 0 for i = 1, tonumber(ARGV[1]) do x = (x + i) % 7 end return x"
_TRIAL_TURNS = 20_000


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
        before = thread_ms(self._client)
        answer = run(self._client, call)
        worked = thread_ms(self._client) - before
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

    def _logged(self) -> float:
        """The last command but the INFO after it."""
        return self._client.slowlog_get(2)[1]["duration"] / 1000

    def close(self) -> None:
        """Log no more."""
        self._client.config_set("slowlog-log-slower-than", -1)


def thread_ms(client: SyncRedis) -> float:
    """The processor time that the server's main thread has used so far."""
    used = client.info("cpu")
    return 1000 * (used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])


def control_loop(clock: ServerClock, ms: float) -> Call[int]:
    """A loop of about `ms` in the server that touches no key: what it takes beyond that is the machine's doing."""
    clock.spent.clear()
    for _ in range(20):
        clock.run(_loop(_TRIAL_TURNS))
    return _loop(max(1, int(_TRIAL_TURNS * ms / max(1e-3, min(clock.spent)))))


def _loop(turns: int) -> Call[int]:
    return read("EVAL", _LOOP, 0, turns, parse=int)
