"""The whole farm: Redis, agent, ranks and API, asked over HTTP."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from control.errors import FurrowError, ModelUnavailable
from control.operations.spec import build_spec
from control.redis.connection import connect
from control.replicas import health
from ops.bench.common.client import Base
from ops.bench.common.farm import NOBODY_REFUSED, private_farm
from ops.bench.common.redis_traffic import traffic
from ops.bench.peers.base import Failed, Setup, Stream, Unavailable
from ops.bench.peers.engines.completions import complete_all
from ops.bench.peers.weights import of_furrow

MODEL = "bench"
SETTLED_S = 1.2
"""Heartbeats, which tell the last command, come more often than that."""


class FurrowFarm:
    """A private farm of one replica."""

    at_once = True

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._stack = ExitStack()
        self._base, self._redis_url = Base("", 0), ""

    def start(self) -> float:
        """As Engine's."""
        setup = self._setup
        dtype, quant = of_furrow(setup.weights, setup.device)
        gpus = ",".join(f"cuda:{index}" for index in range(setup.tp))
        environment = {"OMP_NUM_THREADS": str(max(1, setup.threads // setup.tp))}
        try:
            spec = build_spec(
                str(setup.gguf or setup.folder),
                name=MODEL,
                tp=setup.tp,
                devices="cpu" if setup.device == "cpu" else gpus,
                dtype=dtype,
                kv_tokens=setup.kv_tokens,
                quant=quant,
            )
            began = time.monotonic()
            farm = private_farm(spec, (1,), *NOBODY_REFUSED, environment=environment)
            url, self._redis_url, _ = self._stack.enter_context(farm)
        except ModelUnavailable as error:
            raise Failed(str(error)) from error
        except FurrowError as error:
            raise Unavailable(str(error)) from error
        self._base = Base.of(url)
        return began

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Engine's."""
        fields = {"model": MODEL, "ignore_eos": True, "stream_options": {"include_usage": True}}
        return asyncio.run(complete_all(self._base, fields, prompts, tokens))

    def stop(self) -> None:
        """As Engine's."""
        self._stack.close()

    def traffic(self) -> dict[str, float]:
        """Counts of the commands that Redis has run."""
        with connect(self._redis_url) as client:
            return traffic(client)

    def commands(self) -> int:
        """How many the leader has given in this epoch, each of one forward or several; waits until no more come."""
        with connect(self._redis_url) as client:
            before = -1
            while (now := health.overview(client, MODEL).replicas[0].seq) != before:
                before = now
                time.sleep(SETTLED_S)
            return now
