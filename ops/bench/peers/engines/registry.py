"""Which engines there are, by name, and how each is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ops.bench.peers.base import Engine, Setup
from ops.bench.peers.engines.hosted import Hosted, bare_loop
from ops.bench.peers.servers.furrow_farm import FurrowFarm
from ops.bench.peers.servers.llama_cpp_server import LlamaCppServer
from ops.bench.peers.servers.llama_server import LlamaServer
from ops.bench.peers.servers.transformers_serve import TransformersServe


@dataclass(frozen=True)
class Peers:
    """Where the peers are, and what is set for them."""

    python: str = sys.executable
    """The interpreter that has their packages."""
    llama_server: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables for them alone."""

    def environment(self, threads: int) -> dict[str, str]:
        """Each runs with its own defaults: what this process sets for Furrow's is not for them."""
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        return {**inherited, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **self.settings}


Make = Callable[[Setup, Peers], Engine]


def _peer_loop(name: str) -> Make:
    return lambda setup, peers: Hosted(name, setup, peers.python, peers.environment(setup.threads))


def _transformers_serve(batching: bool) -> Make:
    return lambda setup, peers: TransformersServe(
        setup, peers.python, peers.environment(setup.threads), batching=batching
    )


ENGINES: dict[str, Make] = {
    "furrow-loop": lambda setup, peers: bare_loop(setup),
    "furrow-farm": lambda setup, peers: FurrowFarm(setup),
    "transformers": _peer_loop("transformers_generate"),
    "transformers-batching": _peer_loop("transformers_batching"),
    "transformers-serve": _transformers_serve(batching=True),
    "transformers-serve-plain": _transformers_serve(batching=False),
    "llama.cpp": _peer_loop("llama_cpp"),
    "llama-server": lambda setup, peers: LlamaServer(setup, peers.llama_server, peers.environment(setup.threads)),
    "llama-cpp-server": lambda setup, peers: LlamaCppServer(setup, peers.python, peers.environment(setup.threads)),
}

NEEDS_GGUF = frozenset({"llama.cpp", "llama-server", "llama-cpp-server"})

DEFAULT_ROWS = (
    "furrow-farm:f32",
    "furrow-loop:f32",
    "furrow-farm:f16",
    "furrow-farm:int8",
    "transformers:f32",
    "transformers:bf16",
    "transformers-batching:f32",
    "transformers-serve:f32",
    "llama-server:f32",
    "llama-server:bf16",
    "llama-server:q8_0",
    "llama.cpp:f32",
    "llama.cpp:bf16",
    "llama.cpp:q8_0",
    "llama-cpp-server:q8_0",
)
