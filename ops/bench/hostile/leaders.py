"""`python -m ops.bench.hostile.leaders`: leaders without a model that note when they claim which request.

After SIGTERM they say what they did, as JSON (a list of `Claim`). The model `scripted` has many places, `waiting` has
few, so that nearly all of its requests wait, and their places in the queue change. The models with hostile files only
need leaders to be there.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import click
import msgspec
from tokenizers import Tokenizer

from control.errors import EpochOver, RedisUnavailable
from control.process import die_with_parent
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from control.requests import Claimed, Emission
from control.settings import Settings
from ops.bench.fanout.leaders import step_in_turn
from ops.bench.fanout.replica import MODEL, number_of, publish
from ops.bench.fanout.schedule import Load
from ops.bench.fanout.scripted_leader import ScriptedLeader
from ops.bench.hostile.hostile_files import hostile_assets
from worker.leader.request import RunningRequest

WAITING = "waiting"
REPLICAS, SLOTS, RATE = 4, 64, 20.0
"""Of the model `scripted`: its replicas, the requests of each, the steps a second of each."""
WAITING_SLOTS = 2


class Claim(msgspec.Struct, array_like=True):
    """A request that a leader took at a moment of the monotonic clock. `steps` is the number of tokens that were
    computed for it: a model's ranks would have done a forward for each, the first of them with the whole prompt."""

    number: int
    at: float
    steps: int = 0


class Noting(ScriptedLeader):
    """Notes each claim."""

    def __init__(
        self, client: SyncRedis, model: str, name: str, slots: int, tokenizer: Tokenizer, tokens: Sequence[int]
    ) -> None:
        super().__init__(client, model, name, tokenizer.decode, lambda params: tokens, slots)
        self._tokenizer = tokenizer
        self.claims: dict[str, Claim] = {}

    def turn(self, *, speaks: bool = True, claims: bool = True) -> int:
        """A step; where Redis is too busy to answer in time nothing is done, and what it had done is read later."""
        try:
            return super().turn(speaks=speaks, claims=claims)
        except RedisUnavailable:
            self._adopting, self._after = True, ""
        except EpochOver:
            self.drop()
        return 0

    def tend(self) -> None:
        with suppress(RedisUnavailable, EpochOver):
            super().tend()

    def on_claim(self, claimed: Claimed, request: RunningRequest) -> None:
        claim = Claim(number_of(request.params, self._tokenizer), time.monotonic())
        self.claims.setdefault(claimed.rid, claim)

    def before_emit(self, emissions: Collection[Emission]) -> None:
        for emission in emissions:
            self.claims[emission.rid].steps += len(emission.entries)


@click.command()
def main() -> None:
    """Lead on the Redis that the environment names."""
    die_with_parent()
    stopped = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    client = connect(Settings.from_environment().redis_url)
    tokenizer, tokens = publish(client)
    publish(client, WAITING)
    replicas = [Noting(client, MODEL, f"r{index}", SLOTS, tokenizer, tokens) for index in range(REPLICAS)]
    replicas.append(Noting(client, WAITING, "r0", WAITING_SLOTS, tokenizer, tokens))
    for name, assets in hostile_assets().items():
        publish(client, name, assets)
        replicas.append(Noting(client, name, "r0", WAITING_SLOTS, tokenizer, tokens))
    step_in_turn(replicas, Load(REPLICAS * SLOTS, len(replicas), RATE, 1), lambda: stopped)
    for replica in replicas:
        replica.leave()
    client.close()
    click.echo(msgspec.json.encode([claim for replica in replicas for claim in replica.claims.values()]))


if __name__ == "__main__":
    main()
