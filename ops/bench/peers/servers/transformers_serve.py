"""`transformers serve`, plain or with continuous batching."""

from __future__ import annotations

import sys
from typing import Any

from ops.bench.peers.base import Setup
from ops.bench.peers.engines.served import Served
from ops.bench.peers.weights import of_transformers

_START = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
"""The program of the `transformers` script, which may not be on the path."""

PAGE = 256
"""Tokens of a page of its KV memory, by default."""


class TransformersServe(Served):
    """The server of the transformers package of `python`."""

    absent = ("ModuleNotFoundError", "ImportError")

    def __init__(
        self, setup: Setup, python: str = sys.executable, env: dict[str, str] | None = None, batching: bool = True
    ) -> None:
        super().__init__(setup, env)
        self._python, self._batching = python, batching
        self.at_once = batching

    def command(self, port: int) -> list[str]:
        """As Served's."""
        setup = self._setup
        command = [self._python, "-c", _START, "serve", str(setup.folder), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", of_transformers(setup.weights), "--device", setup.device]
        if self._batching:  # its own default takes most of the memory that there is
            command += ["--continuous-batching", "--cb-num-blocks", str(setup.blocks(PAGE))]
        return command

    def fields(self) -> dict[str, Any]:
        """As Served's."""
        return {"model": str(self._setup.folder)}
