"""Engines behind an HTTP server in processes of their own: the farm, llama.cpp's server, transformers' server."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from control.errors import FurrowError, ModelUnavailable
from control.listening import free_port
from control.operations.spec import build_spec
from control.replicas import model_overviews
from ops.bench.peers.engine import Failed, Setup, Stream, Unavailable
from ops.bench.peers.hosted import Child
from ops.bench.peers.weights import of_furrow, of_transformers
from ops.common.waiting import NotInTime, until
from ops.harness import alphabet
from ops.harness.client import Base, ask, completion
from ops.harness.farm import HOST, NOBODY_REFUSED, PrivateFarm, private_farm, traffic
from ops.local.ready import get

LIMIT_S = 7200.0
"""For a whole run: the slowest server's longest, so that only a hang reaches it."""
START_LIMIT_S = 600.0
MODEL = "bench"
SETTLED_S = 1.2
"""Heartbeats, which tell the last command, come more often than that."""
PAGE = 256
"""Tokens of a page of transformers' KV memory, by default."""
_TRANSFORMERS = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
"""The program of the `transformers` script, which may not be on the path."""


async def complete_all(base: Base, fields: dict[str, Any], prompts: list[list[int]], tokens: int) -> list[Stream]:
    """All prompts at once, each on a connection of its own; `fields` are what this server wants in the body beside
    them. A token is a character of the text. Raises Failed."""

    async def complete(prompt: list[int]) -> Stream:
        body = completion(MODEL, alphabet.text_of(prompt), tokens)
        del body["model"], body["ignore_eos"]
        answer = await ask(base, body | fields, user="bench", exact=False)
        if answer.error is not None and not (answer.error == "no [DONE]" and answer.texts):
            raise Failed(answer.error)
        if answer.prompt_tokens not in (0, len(prompt)):
            raise Failed(f"it counts {answer.prompt_tokens} tokens in a prompt of {len(prompt)}")
        stream = Stream(answer.sent)
        for at, text in zip(answer.stamps, answer.texts, strict=True):
            stream.add(at, *alphabet.ids_of(text))
        return stream

    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(complete(prompt)) for prompt in prompts]
    except* Failed as group:
        raise Failed(str(group.exceptions[0])) from group
    return [task.result() for task in running]


class HttpEngine:
    """An engine behind an HTTP server. A subclass has `command` and `fields`, and answers at /health."""

    absent: tuple[str, ...] = ()
    """Parts of its last lines that mean that it is not installed."""

    def __init__(self, setup: Setup, env: dict[str, str] | None = None) -> None:
        self.setup = setup
        self._env = env or dict(os.environ)
        self._child: Child | None = None
        self._base = Base(HOST, 0)

    def command(self, port: int) -> list[str]:
        """The command line. Raises Unavailable."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """Fields of a completion's body beside prompt, length and temperature."""
        return {}

    def start(self) -> float:
        """As Engine's."""
        self._base = Base(HOST, free_port(HOST, 0))
        command = self.command(self._base.port)
        began = time.monotonic()
        child = self._child = Child(command, self._env)

        def healthy() -> bool:
            if (status := child.process.poll()) is not None:
                words = child.last_words()
                kind = Unavailable if any(sign in words for sign in self.absent) else Failed
                raise kind(f"it ended with status {status}: {words}")
            return get((self._base.host, self._base.port), "/health")[0] == 200

        try:
            until(healthy, "it is ready", START_LIMIT_S, 0.05)
        except NotInTime as error:
            raise Failed(f"{error}: {child.last_words()}") from error
        return began

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Engine's."""
        return asyncio.run(complete_all(self._base, self.fields(), prompts, tokens))

    def stop(self) -> None:
        """As Engine's."""
        if self._child is not None:
            self._child.stop()
            self._child = None


class LlamaServer(HttpEngine):
    """llama.cpp's own server, with as many slots as streams; no prompt is answered from what it remembers."""

    def __init__(self, setup: Setup, program: str | None, env: dict[str, str] | None = None) -> None:
        super().__init__(setup, env)
        self._program = program

    def command(self, port: int) -> list[str]:
        """As HttpEngine's."""
        if self._program is None:
            raise Unavailable("no llama-server is named; give --llama-server FILE")
        setup = self.setup
        sizes = {"--ctx-size": setup.divided_context, "--parallel": setup.streams}
        threads = {"--threads": setup.threads, "--threads-batch": setup.threads}
        listener = {"--host": HOST, "--port": port, "--n-gpu-layers": 999 if setup.device != "cpu" else 0}
        options = {"--model": setup.gguf, **sizes, **threads, **listener}
        return [self._program, *(str(word) for option in options.items() for word in option)]

    def fields(self) -> dict[str, Any]:
        """As HttpEngine's."""
        return {"cache_prompt": False, "ignore_eos": True}


class TransformersServe(HttpEngine):
    """`transformers serve` with continuous batching, of the package of `python`."""

    absent = ("ModuleNotFoundError", "ImportError")

    def __init__(self, setup: Setup, python: str = sys.executable, env: dict[str, str] | None = None) -> None:
        super().__init__(setup, env)
        self._python = python

    def command(self, port: int) -> list[str]:
        """As HttpEngine's."""
        setup = self.setup
        command = [self._python, "-c", _TRANSFORMERS, "serve", str(setup.folder), "--host", HOST, "--port", str(port)]
        command += ["--dtype", of_transformers(setup.weights), "--device", setup.device]
        # Its own default takes most of the memory that there is.
        return [*command, "--continuous-batching", "--cb-num-blocks", str(setup.blocks(PAGE))]

    def fields(self) -> dict[str, Any]:
        """As HttpEngine's."""
        return {"model": str(self.setup.folder)}


class FurrowFarm:
    """A private farm of one replica: Redis, agent, ranks and API."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._stack = ExitStack()
        self._farm: PrivateFarm | None = None

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
            farm = private_farm(spec, *NOBODY_REFUSED, environment=environment)
            self._farm = self._stack.enter_context(farm)
        except ModelUnavailable as error:
            raise Failed(str(error)) from error
        except FurrowError as error:
            raise Unavailable(str(error)) from error
        return began

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Engine's."""
        assert self._farm is not None
        return asyncio.run(complete_all(self._farm.base, {"model": MODEL, "ignore_eos": True}, prompts, tokens))

    def stop(self) -> None:
        """As Engine's."""
        self._stack.close()

    def traffic(self) -> dict[str, float]:
        """Counts of the commands that Redis has run."""
        assert self._farm is not None
        return traffic(self._farm.client)

    def commands(self) -> int:
        """The number of commands in this epoch, each of one forward or several; waits until no more come."""
        assert self._farm is not None
        before = -1
        while (now := model_overviews.overview(self._farm.client, MODEL).replicas[0].seq) != before:
            before = now
            time.sleep(SETTLED_S)
        return now
