"""The limits of the machine, by its memory and matrix products, and the limits of a model that follow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ops.bench.peers.engine import Row
from ops.bench.peers.weights import BYTES, kv_bytes

READ_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Of a buffer: more than any cache holds."""
SIDE = {"cpu": 1536, "cuda": 8192}
"""Of the square matrices that are multiplied."""
REPEATS = 5


@dataclass
class Machine:
    """The best seen so far: bytes per second by kernel, operations per second by type (a product and a sum are two)."""

    read: dict[str, float] = field(default_factory=dict)
    multiply: dict[str, float] = field(default_factory=dict)

    def measure(self, device: str, threads: int) -> None:
        """Run every kernel a few times; keeps the best of this call and those before."""
        if device == "cpu":
            torch.set_num_threads(threads)
        kind = device.partition(":")[0]
        size = READ_BYTES[kind]
        side = SIDE[kind]
        for name, work in _readers(device, size).items():
            self._keep(self.read, name, size / _fastest(work, device))
        for name, work in _multipliers(device, side).items():
            self._keep(self.multiply, name, 2 * side**3 / _fastest(work, device))

    def implied(self, row: str, bytes_per_second: float) -> None:
        """An engine that reads faster than the kernels is the better kernel."""
        self._keep(self.read, row, bytes_per_second)

    def implied_operations(self, weights: str, operations_per_second: float) -> None:
        """The same for products."""
        kind = "f32" if BYTES[weights] >= 4 else "bf16" if BYTES[weights] >= 2 else "int8"
        self._keep(self.multiply, kind, operations_per_second)

    @property
    def bandwidth(self) -> float:
        return max(self.read.values())

    def operations(self, weights: str) -> float:
        """Per second, with weights of that kind: those of narrower ones may be widened, never the reverse."""
        usable = ["f32"] if BYTES[weights] >= 4 else ["f32", "bf16"] if BYTES[weights] >= 2 else list(self.multiply)
        return max(self.multiply[name] for name in usable if name in self.multiply)

    @staticmethod
    def _keep(best: dict[str, float], name: str, value: float) -> None:
        best[name] = max(value, best.get(name, 0.0))


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a model's forward: values of the matrices that every token meets, of the head among them, and of the
    cache per position."""

    matrices: int
    head: int
    cached: int

    @classmethod
    def of(cls, folder: Path) -> Cost:
        """From a Qwen3 configuration."""
        config = json.loads((folder / "config.json").read_text())
        hidden = config["hidden_size"]
        layers = config["num_hidden_layers"]
        width = config["head_dim"]
        queries = config["num_attention_heads"] * width
        keys = config["num_key_value_heads"] * width
        layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * config["intermediate_size"]
        head = hidden * config["vocab_size"]
        return cls(layers * layer + head, head, layers * 2 * keys)

    def step_bytes(self, row: Row, device: str, streams: int, context: float) -> float:
        """Read by one step that decodes `streams` sequences of `context` positions."""
        cached = self.cached * kv_bytes(row.engine, row.weights, device)
        return self.matrices * BYTES[row.weights] + streams * context * cached

    def decode_limit(self, machine: Machine, row: Row, device: str, streams: int, context: float) -> float:
        """Tokens per second: no step is shorter than its reading, nor than its products."""
        reading = self.step_bytes(row, device, streams, context) / machine.bandwidth
        products = 2 * self.matrices * streams / machine.operations(row.weights)
        return streams / max(reading, products)

    def first_token_limit(self, machine: Machine, row: Row, prompt: int) -> float:
        """Seconds from a prompt to its first token; attention's own products are left out, so it is a bit low."""
        products = self.prompt_operations(prompt)
        return max(products / machine.operations(row.weights), self.matrices * BYTES[row.weights] / machine.bandwidth)

    def prompt_operations(self, prompt: int) -> int:
        """Of a prompt and its first token: only the last position meets the head."""
        return 2 * ((self.matrices - self.head) * prompt + self.head)


def _readers(device: str, size: int) -> dict[str, Callable[[], Any]]:
    """Kernels that read `size` bytes once and write next to nothing."""
    floats = torch.ones(size // 4, device=device)
    matrix = floats.view(-1, 4096)
    vector = torch.ones(4096, device=device)
    half = floats.view(torch.int16).view(torch.bfloat16)
    readers: dict[str, Callable[[], Any]] = {
        "sum": lambda: floats.sum(),
        "max": lambda: floats.max(),
        "matrix × vector": lambda: matrix @ vector,
        "bf16 sum": lambda: half.sum(),
    }
    if device == "cpu":
        integers = floats.view(torch.int64)
        readers["integer sum"] = lambda: integers.sum()
    return readers


def _multipliers(device: str, side: int) -> dict[str, Callable[[], Any]]:
    """Square products by type, as far as this build of torch has them."""
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16}
    products: dict[str, Callable[[], Any]] = {}
    for name, dtype in kinds.items():
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        products[name] = lambda left=left, right=right: left @ right
    int_mm: Callable[..., Any] | None = getattr(torch, "_int_mm", None)
    if int_mm is not None:
        left8, right8 = (torch.randint(-9, 9, (side, side), device=device).to(torch.int8) for _ in range(2))
        products["int8"] = lambda: int_mm(left8, right8)
    return products


def _fastest(work: Callable[[], Any], device: str) -> float:
    """Seconds of the quickest of a few calls, the first of which warms up."""
    best = math.inf
    for _ in range(REPEATS + 1):
        _finish(device)
        began = time.perf_counter()
        work()
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return best


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
