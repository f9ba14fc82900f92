"""The server of the llama-cpp-python package, which answers one request at a time."""

from __future__ import annotations

import sys

from ops.bench.peers.base import Setup
from ops.bench.peers.engines.served import HOST, Served


class LlamaCppServer(Served):
    """`python -m llama_cpp.server`."""

    health = "/v1/models"
    at_once = False
    absent = ("ModuleNotFoundError", "No module named")

    def __init__(self, setup: Setup, python: str = sys.executable, env: dict[str, str] | None = None) -> None:
        super().__init__(setup, env)
        self._python = python

    def command(self, port: int) -> list[str]:
        """As Served's."""
        setup = self._setup
        options = {
            "--model": setup.gguf,
            "--n_ctx": setup.context + 8,
            "--n_threads": setup.threads,
            "--n_threads_batch": setup.threads,
            "--n_gpu_layers": -1 if setup.device != "cpu" else 0,
            "--host": HOST,
            "--port": port,
            # Its default ends a running answer when another request comes.
            "--interrupt_requests": False,
        }
        return [self._python, "-m", "llama_cpp.server", *(str(word) for option in options.items() for word in option)]
