"""Products of several builds of the C++ library in turns: compilers and flags beside one another."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from ops.harness.program import Outcome, benchmark, run
from worker.native.library import NUMBERS, Linear, declare_products
from worker.native.memory import empty, zeros

INPUTS = 1024
OUTPUTS = 4096
BLOCKS = {"q8_0": (34, 32, (1,)), "q4_k": (144, 256, (1, 3)), "q6_k": (210, 256, (209,))}
"""Bytes and weights of a block of a file, and the places of the high bytes of its float16 numbers."""
KINDS = ("bfloat16", "int8", *BLOCKS)
TURNS = 60


@dataclass(frozen=True)
class Product:
    """A layer with random weights, packed by one library; `memory` holds them."""

    library: ctypes.CDLL
    pool: int
    linear: Linear
    memory: list[NDArray[Any]]

    def microseconds(self, x: NDArray[np.float32], out: NDArray[np.float32]) -> float:
        """Of one product of the rows `x` [rows, INPUTS], by one thread."""
        room = empty(self.library.furrow_product_room(ctypes.byref(self.linear), len(x)), np.uint8)
        addresses = x.ctypes.data, len(x), out.ctypes.data, room.ctypes.data
        begun = time.perf_counter()
        self.library.furrow_product(self.pool, ctypes.byref(self.linear), *addresses)
        return (time.perf_counter() - begun) * 1e6


def stored(kind: str) -> NDArray[Any]:
    """Random weights as a checkpoint has them."""
    random = np.random.default_rng(1)
    if kind == "bfloat16":
        return random.integers(0x3C00, 0x3D00, (OUTPUTS, INPUTS), dtype=np.uint16)
    if kind not in BLOCKS:
        return random.standard_normal((OUTPUTS, INPUTS), dtype=np.float32)
    size, weights, places = BLOCKS[kind]
    rows = random.integers(0, 256, (OUTPUTS * INPUTS // weights, size), dtype=np.uint8)
    for place in places:
        rows[:, place] = 0x20  # a small number
    return rows


def product(library: ctypes.CDLL, kind: str) -> Product:
    """The layer of one library; all have the same weights."""
    pool: int = library.furrow_pool(1)
    number = NUMBERS[kind]
    packed = zeros(library.furrow_matrix_bytes(number, INPUTS, OUTPUTS), np.uint8)
    scales = zeros(OUTPUTS, np.float32)
    sums = zeros(OUTPUTS, np.int32)
    linear = Linear(inputs=INPUTS, outputs=OUTPUTS, count=1)
    matrix = linear.matrices[0]
    matrix.weights, matrix.scales, matrix.sums = packed.ctypes.data, scales.ctypes.data, sums.ctypes.data
    matrix.outputs, matrix.kind = OUTPUTS, number
    rows = stored(kind)
    library.furrow_pack(pool, ctypes.byref(matrix), INPUTS, rows.ctypes.data, OUTPUTS, 0)
    return Product(library, pool, linear, [packed, scales, sums])


@benchmark
@click.argument("libraries", metavar="NAME=FILE...", nargs=-1, required=True)
def compilers(
    libraries: tuple[str, ...],
) -> Outcome:
    """Time products with weights that a cache holds, by one thread: the fastest of each library's turns, in µs.

    FILE is a library in ~/.cache/furrow/compiled, or of a wheel (`python -m ops.wheels --libraries-only`). What else
    runs on the machine disturbs the fastest turn least.
    """
    loaded: dict[str, ctypes.CDLL] = {}
    for word in libraries:
        name, _, file = word.partition("=")
        loaded[name] = ctypes.CDLL(file)
        declare_products(loaded[name])
        click.echo(f"{name}: {loaded[name].furrow_build().decode()}")
    click.echo(f"1 thread, {OUTPUTS} x {INPUTS}")
    microseconds: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        products = {name: product(library, kind) for name, library in loaded.items()}
        for rows in (1, 8, 64):
            x = np.random.default_rng(2).standard_normal((rows, INPUTS), dtype=np.float32)
            out = empty((rows, OUTPUTS), np.float32)
            fastest = dict.fromkeys(products, float("inf"))
            for _ in range(TURNS):
                for name, one in products.items():
                    fastest[name] = min(fastest[name], one.microseconds(x, out))
            microseconds[f"{kind}, {rows} rows"] = fastest
            click.echo(f"{kind}, {rows} rows: " + ", ".join(f"{name} {value:.0f}" for name, value in fastest.items()))
    return Outcome(details={"microseconds": microseconds})


if __name__ == "__main__":
    run(compilers)
