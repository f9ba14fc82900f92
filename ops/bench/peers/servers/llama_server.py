"""llama.cpp's own server, a program named by `--llama-server`."""

from __future__ import annotations

from typing import Any

from ops.bench.peers.base import Setup, Unavailable
from ops.bench.peers.engines.served import HOST, Served


class LlamaServer(Served):
    """As many slots as streams; no prompt is answered from what it remembers."""

    def __init__(self, setup: Setup, program: str | None, env: dict[str, str] | None = None) -> None:
        super().__init__(setup, env)
        self._program = program

    def command(self, port: int) -> list[str]:
        """As Served's."""
        if self._program is None:
            raise Unavailable("no llama-server is named; give --llama-server FILE")
        setup = self._setup
        sizes = {"--ctx-size": setup.divided_context, "--parallel": setup.streams}
        threads = {"--threads": setup.threads, "--threads-batch": setup.threads}
        where = {"--host": HOST, "--port": port, "--n-gpu-layers": 999 if setup.device != "cpu" else 0}
        options = {"--model": setup.gguf, **sizes, **threads, **where}
        return [self._program, *(str(word) for option in options.items() for word in option)]

    def fields(self) -> dict[str, Any]:
        """As Served's."""
        return {"cache_prompt": False, "ignore_eos": True}
