"""Leaders without a model that note when they claim which request.

The model `scripted` has many places, `waiting` has few, so that nearly all of its requests wait, and their places in
the queue change. The models with hostile files only need leaders to be there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from tokenizers import Tokenizer

from control.errors import EpochOver, RedisUnavailable
from control.messages import ModelAssets
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from control.requests import Claimed, Emission
from ops.bench.fanout.leaders import MODEL, StreamLoad, demo_assets, number_of, publish, step_in_turn
from ops.harness.processes import until_terminated
from ops.harness.scripted_leader import ScriptedLeader
from worker.leader.request import RunningRequest

WAITING = "waiting"
# Of the model `scripted`: its replicas, the requests of each, the steps a second of each.
REPLICAS = 4
SLOTS = 64
RATE = 20.0
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
            self._adopting = True
            self._after = ""
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


# --- two models with hostile files ------------------------------------------------------------------------------------

# What they want is bounded even where nothing bounds it: a control does it in the API process. There a loop takes some
# seconds, and a text some hundred MB.
LOOPS = "{% for a in range(99999) %}{% for b in range(1500) %}{% endfor %}{% endfor %}"
CENTER = "{{ 'x'|center(100000000) }}"
DOUBLE = (
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(24) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
)
TEMPLATE = (
    "{% set digit = messages[0].content[-1:] %}"
    f"{{% if digit in '0123' %}}{LOOPS}{{% elif digit in '4567' %}}{CENTER}{{% else %}}{DOUBLE}{{% endif %}}"
    "{{ messages[0].content }}"
)
"""A template whose attack depends on the last digit of the message."""
MULTIPLIED = "z"
TOKENIZED = "{{ messages[0].content }} " + MULTIPLIED
HOSTILE_MODELS = ("hostile-template", "hostile-tokenizer")
CONTEXT = 4096
"""Tokens: what a template writes without bounds is refused before all of it is tokenised."""


def hostile_assets() -> dict[str, ModelAssets]:
    """By the name of the model."""
    assets = msgspec.structs.replace(demo_assets(), context_length=CONTEXT)
    tokenizer_json = multiplying(assets.tokenizer_json)
    template, tokenizer = HOSTILE_MODELS
    return {
        template: msgspec.structs.replace(assets, chat_template=TEMPLATE),
        tokenizer: msgspec.structs.replace(assets, chat_template=TOKENIZED, tokenizer_json=tokenizer_json),
    }


def multiplying(tokenizer_json: str) -> str:
    """A tokenizer.json whose normalizer makes 64 ** 6 characters of each `MULTIPLIED`, and alters no other text."""
    definition: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    parts = [{"type": "Replace", "pattern": {"String": MULTIPLIED}, "content": MULTIPLIED * 64}] * 6
    definition["normalizer"] = {"type": "Sequence", "normalizers": parts}
    return msgspec.json.encode(definition).decode()


# --- the process ------------------------------------------------------------------------------------------------------


def lead_noting(redis_url: str) -> list[Claim]:
    """Lead until SIGTERM; every claim."""
    stopped = until_terminated()
    client = connect(redis_url)
    tokenizer, tokens = publish(client)
    publish(client, WAITING)
    replicas = [Noting(client, MODEL, f"r{index}", SLOTS, tokenizer, tokens) for index in range(REPLICAS)]
    replicas.append(Noting(client, WAITING, "r0", WAITING_SLOTS, tokenizer, tokens))
    for name, assets in hostile_assets().items():
        publish(client, name, assets)
        replicas.append(Noting(client, name, "r0", WAITING_SLOTS, tokenizer, tokens))
    step_in_turn(replicas, StreamLoad(REPLICAS * SLOTS, len(replicas), RATE, 1), stopped)
    for replica in replicas:
        replica.leave()
    client.close()
    return [claim for replica in replicas for claim in replica.claims.values()]
