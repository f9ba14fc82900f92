"""Every kernel for a linear layer, timed on the layers of a model's shape."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import click
import torch
from torch import Tensor
from torch.nn import functional

from ops.harness.models import SHAPES
from ops.harness.program import Outcome, Shape, ThreadCount, benchmark, run
from worker.models.torch.layers import Matrix, NativeLinear
from worker.native.library import Threads, threads_here
from worker.tensors import as_array
from worker.weights.formats import BLOCK_FORMATS, BlockFormat
from worker.weights.quantizer import quantize
from worker.weights.stored_matrix import Kept, StoredMatrix

COLD_BYTES = 512 * 2**20
"""Weights that are gone through between two uses of the same one: more than any cache, as in a whole model."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The bytes that a weight takes, and how a layer is made for products with `rows` rows from what `stored` makes of
    the float32 weight."""

    name: str
    bytes: float
    make: Callable[[Any, int], Product]
    stored: Callable[[Tensor], Matrix] = torch.Tensor.contiguous


def _plain(weight: Tensor, rows: int) -> Product:
    return lambda inputs: functional.linear(inputs, weight)


def _transposed(weight: Tensor, rows: int) -> Product:
    columns = weight.t().contiguous()
    return lambda inputs: inputs @ columns


def _mkl(weight: Tensor, rows: int) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda inputs: torch.ops.mkl._mkl_linear(inputs, packed, weight, None, rows)


def _blocks(format: BlockFormat) -> Callable[[Tensor], Matrix]:
    return lambda weight: StoredMatrix(format.name, quantize(as_array(weight), format, _threads()))


def _native(kind: Kept) -> Callable[[Matrix, int], Product]:
    return lambda weight, rows: NativeLinear([weight], None, [kind], _threads())


@functools.cache
def _threads() -> Threads:
    """Made once the number of threads is known."""
    threads = threads_here()
    if threads is None:
        raise click.ClickException("the kernels in C++ need a compiler and a processor with AVX2; choose others")
    return threads


KERNELS = (
    Kernel("plain", 4, _plain),
    Kernel("transposed", 4, _transposed),
    Kernel("mkl", 4, _mkl),
    Kernel("bf16 in C++", 2, _native("bfloat16")),
    Kernel("int8 in C++", 1, _native("int8")),
    *(
        Kernel(f"{name} in C++", format.bytes / format.weights, _native(name), _blocks(format))
        for name, format in BLOCK_FORMATS.items()
    ),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a model, and how often the model has it."""

    name: str
    outputs: int
    inputs: int
    count: int


@dataclass(frozen=True, slots=True)
class Timing:
    """The median over all passes; `gb_per_second` counts the weights' bytes only."""

    layer: str
    kernel: str
    rows: int
    milliseconds: float
    gb_per_second: float


def layers_of(shape: dict[str, Any]) -> list[Layer]:
    """The products of a step, siblings fused as the engine has them."""
    hidden = shape["hidden_size"]
    depth = shape["num_hidden_layers"]
    head_dim = shape["head_dim"]
    heads = shape["num_attention_heads"]
    shared = shape["num_key_value_heads"]
    width = shape["intermediate_size"]
    return [
        Layer("q, k, v", (heads + 2 * shared) * head_dim, hidden, depth),
        Layer("o", hidden, heads * head_dim, depth),
        Layer("gate, up", 2 * width, hidden, depth),
        Layer("down", hidden, width, depth),
        Layer("head", shape["vocab_size"], hidden, 1),
    ]


@benchmark
@torch.inference_mode()
def linears(
    shape: Shape = "qwen3-0.6b",
    counts: Annotated[tuple[int, ...], "--rows"] = (1, 8, 64, 512),
    names: Annotated[
        tuple[str, ...], "--kernel", click.Choice([kernel.name for kernel in KERNELS]), "Only these."
    ] = (),
    passes: Annotated[int, "Measured passes over the weights."] = 5,
    threads: ThreadCount = None,
) -> Outcome:
    """Time a step's linear layers, each with every kernel, on weights that no cache holds."""
    if threads is not None:
        torch.set_num_threads(threads)
    click.echo(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    click.echo(f"{shape}: ms (GB/s of weights), {passes} passes")
    kernels = [kernel for kernel in KERNELS if not names or kernel.name in names]
    all_timings: list[Timing] = []
    for rows in counts:
        totals = dict.fromkeys((kernel.name for kernel in kernels), 0.0)
        for layer in layers_of(SHAPES[shape]):
            timings = [measure(layer, kernel, rows, passes) for kernel in kernels]
            all_timings += timings
            cells = (f"{timing.kernel} {timing.milliseconds:.3f} ({timing.gb_per_second:.1f})" for timing in timings)
            click.echo(f"{rows} rows, {layer.name} {layer.outputs} x {layer.inputs}: {'; '.join(cells)}")
            for timing in timings:
                totals[timing.kernel] += timing.milliseconds * layer.count
        speeds = (f"{name} {1000 * rows / total:.1f}" for name, total in totals.items())
        click.echo(f"{rows} rows, all layers of a step, tokens/s: {'; '.join(speeds)}")
    return Outcome(details={"timings": all_timings})


def measure(layer: Layer, kernel: Kernel, rows: int, passes: int) -> Timing:
    """The layer with `kernel`, on as many copies of the weight as a cache can't hold, one after the other."""
    size = kernel.bytes * layer.outputs * layer.inputs
    weight = kernel.stored(torch.randn(layer.outputs, layer.inputs))
    # As many as a model has at most: a small model stays in the cache in service too.
    count = min(layer.count, int(COLD_BYTES // size) + 1)
    copies = [kernel.make(deepcopy(weight), rows) for _ in range(count)]
    inputs = torch.randn(rows, layer.inputs)
    seconds: list[float] = []
    for number in range(passes + 1):
        begin = time.perf_counter()
        for product in copies:
            product(inputs)
        if number > 0:
            seconds.append((time.perf_counter() - begin) / len(copies))
    took = median(seconds)
    return Timing(layer.name, kernel.name, rows, took * 1e3, size / took / 1e9)


if __name__ == "__main__":
    run(linears)
