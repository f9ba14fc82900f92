"""Layers in torch: tensor-parallel, fused and quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from control.errors import CompilerMissing, SettingsError
from worker.collective.base import Link
from worker.models.native.linear import PackedLinear, kept_as
from worker.models.shard import (
    LinearGroup,
    groups_of,
)
from worker.native.compiled import compiler_missing
from worker.native.host import INSTALL, INSTEAD
from worker.native.library import Threads, reason_missing, threads_here
from worker.selftest.shapes import Shapes
from worker.tensors import as_array, as_tensor, number_type
from worker.weights.sharding import ShardPlan, padded_share
from worker.weights.stored_matrix import StoredMatrix

# Packed weights (native/linear.py) as modules of torch, for encoders and models whose forward is not C++.


class NativeLinear(nn.Module):
    """y = x · Wᵀ + b in float32. x (…, inputs) → y (…, outputs); see PackedLinear."""

    def __init__(
        self, parts: Sequence[Any], bias: Tensor | None, kinds: Sequence[torch.dtype | str], threads: Threads
    ) -> None:
        """`parts` (outputs, inputs): tensors, or stored matrices. Raises ValueError as PackedLinear."""
        super().__init__()
        stored = [part if isinstance(part, StoredMatrix) else as_array(part) for part in parts]
        names = [str(kind).removeprefix("torch.") for kind in kinds]
        self.packed = PackedLinear(stored, None if bias is None else as_array(bias), names, threads)
        self.outputs = self.packed.outputs
        self.inputs = self.packed.inputs
        self.threads = threads

    @property
    def packed_bytes(self) -> int:
        """Of weights and bias."""
        return self.packed.bytes

    def forward(self, inputs: Tensor) -> Tensor:
        return as_tensor(self.packed.product(as_array(inputs)))

    def look_up(self, ids: Tensor) -> Tensor:
        """The weights of the outputs `ids` (…) as rows (…, inputs)."""
        return as_tensor(self.packed.look_up(as_array(ids)))


class PackedEmbedding(nn.Module):
    """ids (…) → rows (…, hidden) in float32, looked up in packed weights: those of the tied head, or its own."""

    def __init__(self, table: NativeLinear, embedding: nn.Module, own: bool = False) -> None:
        """Replaces `embedding`, whose scale some families have. `own`: the table is no part of another module."""
        super().__init__()
        self.weight = torch.empty(table.outputs, 0)  # only to say how many rows there are
        self.table = table if own else None
        self._look_up = table.look_up
        self._scale = getattr(embedding, "embed_scale", None)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._look_up(ids)
        return rows if self._scale is None else rows * self._scale


# Weights as they are: any type, any device.


class DenseLinear(nn.Module):
    """y = x · Wᵀ + b. x (…, inputs) → y (…, outputs)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # A parameter stays the same one: a tied head shares the embedding's.
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight, self.bias)


def stacked(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parts (rows, …) one under the other, always as a copy. A tensor of safetensors may be the mapped file, which
    may change in place, and whose alignment would change the speed and the last bits of products."""
    rows = sum(part.shape[0] for part in parts)
    rows_of_all = torch.empty(rows, *parts[0].shape[1:], dtype=dtype, device=device)
    for place, part in zip(rows_of_all.split([part.shape[0] for part in parts]), parts, strict=True):
        place.copy_(part)
    return rows_of_all


# Embedding tables apart from a packed head: their rows in 16 bits.


class HalfEmbedding(nn.Module):
    """ids (…) → rows (…, hidden) in float32, from a table in the checkpoint's own 16-bit type, or float16. Replaces
    transformers' embedding, also the scaled one of some families."""

    def __init__(self, embedding: nn.Embedding, rows: Tensor) -> None:
        super().__init__()
        dtype = rows.dtype if rows.dtype in (torch.float16, torch.bfloat16) else torch.float16
        self.weight = nn.Parameter(torch.empty(rows.shape, dtype=dtype).copy_(rows), requires_grad=False)
        self._scale: Tensor | None = getattr(embedding, "embed_scale", None)

    def forward(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale


# Which linear layer holds a model's weights, by what was asked for and what the machine can do.


Matrix = Tensor | StoredMatrix
"""A matrix (outputs, inputs) as stored: plain numbers, or quantized ones."""

Pack = Callable[[list[Any], Tensor | None], nn.Module]
"""(weights of layers that share their input, as stored, each (outputs, inputs); their biases joined) → one layer."""


@dataclass(frozen=True)
class Packing:
    """The form in which a model's linear layers are kept: made by `pack`, in an order of their own where `packed`."""

    pack: Pack
    packed: bool
    quantized: bool
    shares_tables: bool = False
    """True if an embedding can be looked up in the head that `pack` made of the same table."""
    rounds_tables: bool = False
    """True if such a look-up gives rows in 8 bits. Families that scale their embedding have the table apart: its
    rounding would be scaled too."""

    threads: Threads | None = None
    """Those of the C++ products; None where torch computes the layers."""

    def keeps_stored_rows(self, table: Matrix) -> bool:
        """True if an embedding stays apart from the head, in the 16 bits in which it is stored. A packed head allows no
        look-up; a float32 table beside it would double the memory."""
        if isinstance(table, StoredMatrix):
            return False
        return self.quantized or (self.packed and table.dtype in (torch.float16, torch.bfloat16))


def packing(
    quant: str | None,
    dtype: torch.dtype,
    device: torch.device,
    kinds: Iterable[str] | None = None,
    shapes: Shapes | None = None,
) -> Packing:
    """The form of linear layers: packed in float32 on a CPU that runs the C++ products, else dense in `dtype`. `kinds`:
    those that the C++ products must have, by native/library.py; None: all. `shapes`: those that they are checked with.
    Raises SettingsError for a `quant` where there are no C++ products."""
    native = dtype == torch.float32 and device.type == "cpu"
    threads = threads_here(kinds, shapes) if native else None
    if threads is None:
        if quant is not None:
            raise _not_in_cpp(f"--quant {quant} is", INSTEAD)
        return Packing(partial(_dense, dtype, device), packed=False, quantized=False)

    def pack(parts: Sequence[Matrix], bias: Tensor | None) -> nn.Module:
        if any(0 in part.shape for part in parts):  # of 0 shared experts; the C++ products have no empty matrix
            return _dense(dtype, device, parts, bias)
        return NativeLinear(parts, bias, [kept_as(part, quant) for part in parts], threads)

    return Packing(
        pack,
        packed=True,
        quantized=quant is not None,
        shares_tables=True,
        rounds_tables=quant == "int8",
        threads=threads,
    )


def _dense(dtype: torch.dtype, device: torch.device, parts: Sequence[Matrix], bias: Tensor | None) -> nn.Module:
    """Raises SettingsError for weights in blocks, which only the C++ products read."""
    plain: list[Tensor] = []
    for part in parts:
        if isinstance(part, StoredMatrix) and part.in_blocks:
            raise _not_in_cpp(f"weights in {part.kind} are", "Serve them with --dequantize on this host.")
        plain.append(as_tensor(part.dequantized(number_type(dtype))) if isinstance(part, StoredMatrix) else part)
    return DenseLinear(stacked(plain, dtype, device), None if bias is None else bias.to(device, dtype))


def _not_in_cpp(subject: str, remedy: str) -> SettingsError:
    """The error for weights that only C++ computes; CompilerMissing where another start would end alike."""
    reason = reason_missing() or "this model is not served in float32 on a CPU with AVX2"
    missing = bool(reason_missing()) and compiler_missing()
    install = f"{INSTALL} Or: " if missing else ""
    return (CompilerMissing if missing else SettingsError)(
        f"{subject} computed in C++ only, but {reason}. {install}{remedy}"
    )


# RMS norms as one call into torch instead of six.


TOLERANCE = 1e-6


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dimension, in float32. The weight may be None."""

    def __init__(self, weight: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> None:
    """Replace every RMS norm of a float32 model that computes the same as torch's. Each norm is measured, because
    formulas differ by family (some add one to the weight)."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if (fused := _equal(child)) is not None:
                setattr(model.get_submodule(path), name, fused)


def _equal(norm: Any) -> FusedRMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if "RMSNorm" not in type(norm).__name__ or not isinstance(eps, float):
        return None
    weighted = isinstance(weight, Tensor)
    sample = torch.randn(4, *(weight.shape if weighted else (16,)), generator=torch.Generator().manual_seed(0))
    expected = norm(sample)
    for candidate in (weight.detach(), 1.0 + weight.detach()) if weighted else (None,):
        fused = FusedRMSNorm(candidate, eps)
        if torch.allclose(fused(sample), expected, rtol=TOLERANCE, atol=TOLERANCE):
            return fused
    return None


# Linear layers of one input as one product: query, key and value, gate and up, and those of recurrent layers.


def linear_groups(model: nn.Module, head: nn.Module) -> Iterator[LinearGroup]:
    """Every linear layer but the head and those of UNPACKED, once. Siblings are joined where both all or none have a
    bias."""
    for path, parent in model.named_modules():
        linears: dict[str, Any] = {
            name: child for name, child in parent.named_children() if type(child) is nn.Linear and child is not head
        }
        # nn.Linear declares its bias as a parameter, and holds None.
        yield from groups_of(
            path, {name: (linear.in_features, linear.bias is not None) for name, linear in linears.items()}
        )


class FusedLinear(nn.Module):
    """One product for siblings: whoever is asked first multiplies for all, the others take their part of the result."""

    def __init__(self, linear: nn.Module, widths: list[int]) -> None:
        super().__init__()
        self.linear = linear
        self._widths = widths
        self._inputs: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._unread = 0

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """The outputs of sibling `index`, a view. The same input is known by its identity, so any order is right."""
        if inputs is not self._inputs:
            self._parts = self.linear(inputs).split(self._widths, -1)
            self._inputs, self._unread = inputs, len(self._widths)
        result = self._parts[index]
        self._unread -= 1
        if not self._unread:
            # Nothing outlives its layer, and no tensor is ever taken for a later one.
            self._inputs = None
            self._parts = ()
        return result


def install_group(model: nn.Module, group: LinearGroup, linear: nn.Module, widths: list[int]) -> None:
    """Put `linear`, which holds the whole group, where the group's layers were."""
    parent: Any = model.get_submodule(group.parent)
    if len(group.names) == 1:
        setattr(parent, group.names[0], linear)
        return
    fused = FusedLinear(linear, widths)
    setattr(parent, "_".join(group.names), fused)
    for index, name in enumerate(group.names):
        delattr(parent, name)
        # Not a module: saves a look-up and a call through torch's hooks, per layer and step.
        setattr(parent, name, partial(fused.part, index))


# The modules that replace transformers' where ranks must exchange something. They exist only at tp 2 and more.


class RowParallelLinear(nn.Module):
    """y = Σ over ranks of x_rank · W_rankᵀ, then the bias once. x (…, inputs / ranks) → y (…, outputs). `partial` is
    this rank's product, without a bias."""

    def __init__(self, partial: nn.Module, bias: Tensor | None, link: Link) -> None:
        super().__init__()
        self.partial = partial
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._link = link

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self._link.collective.rank == 0

    def forward(self, inputs: Tensor) -> Tensor:
        whole = self._link.collective.all_reduce(self.partial(inputs))
        return whole if self.bias is None else whole + self.bias


class ReducedExperts(nn.Module):
    """Experts whose inner width is split: each rank's output is a partial sum."""

    def __init__(self, experts: nn.Module, link: Link) -> None:
        super().__init__()
        self.experts = experts
        self._link = link

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._link.collective.all_reduce(self.experts(*args, **kwargs).contiguous())


class WidthNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over a width that is split over the ranks: the ranks sum their squares."""

    def __init__(self, norm: Any, link: Link) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps = norm.variance_epsilon
        self._link = link

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        collective = self._link.collective
        squares = collective.all_reduce(wide.square().sum(-1, keepdim=True))
        # Heads that several ranks keep count several times in both.
        width = wide.shape[-1] * collective.world_size
        return (self.weight * (wide * torch.rsqrt(squares / width + self._eps))).to(hidden.dtype)


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the ids from `start` on that it holds; ids of others give zeros, and the sum is complete."""

    def __init__(self, embedding: Any, start: int, link: Link) -> None:
        super().__init__()
        # Kept as a module: some families scale in their embedding's own forward.
        self.embedding = embedding
        self._start = start
        self._link = link

    @classmethod
    def of(cls, embedding: nn.Module, start: int, link: Link) -> VocabParallelEmbedding:
        """Around an embedding whose weights hold this rank's rows, from `start` on."""
        if isinstance(embedding, nn.Embedding):
            # Its own sizes, after its rows were cut. Only training reads padding_idx, and torch refuses one
            # that is outside of the rank's rows.
            embedding.num_embeddings = embedding.weight.shape[0]
            embedding.padding_idx = None
        return cls(embedding, start, link)

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._start
        mine = (local >= 0) & (local < self.embedding.weight.shape[0])
        vectors = self.embedding(local.where(mine, 0))
        return self._link.collective.all_reduce(vectors.masked_fill(~mine.unsqueeze(-1), 0))


class VocabParallelHead(nn.Module):
    """Each rank scores its part of the vocabulary; all ranks get the whole. The last rank's part may be padded."""

    def __init__(self, head: nn.Module, vocab_size: int, link: Link) -> None:
        super().__init__()
        self.head = head
        self._vocab_size = vocab_size
        self._link = link

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.numel():
            return hidden.new_empty(*hidden.shape[:-1], self._vocab_size)
        return self._link.collective.all_gather(self.head(hidden))[..., : self._vocab_size]


def split_vocabulary(model: Any, plan: ShardPlan, link: Link) -> None:
    """Wrap embedding and head, whose weights hold this rank's rows already."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    vocab_size = model.config.vocab_size
    start, _, _ = padded_share(vocab_size, plan.rank, plan.world_size)
    model.set_output_embeddings(VocabParallelHead(head, vocab_size, link))
    model.set_input_embeddings(VocabParallelEmbedding.of(embedding, start, link))


def sparse_gates(model: nn.Module, link: Link) -> None:
    """Let modules of gemma3n find the border of a row's gate over all ranks' parts. On the way no tensor is made of a
    number, which graphs of CUDA could not capture."""
    for module in model.modules():
        sparse: Any = module
        if (share := getattr(sparse, "activation_sparsity", 0)) > 0:
            deviations = torch.distributions.Normal(0, 1).icdf(torch.tensor(share, dtype=torch.float32)).item()
            sparse._gaussian_topk = partial(_above_border, deviations, link)


def _above_border(deviations: float, link: Link, inputs: Tensor) -> Tensor:
    """inputs (…, width / ranks) → what lies above mean + `deviations` · deviation of all ranks' row, less that. Sums
    are of float32 at least: in float16 those of squares overflow."""
    collective = link.collective
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    width = collective.all_reduce(wide.new_full((1,), wide.shape[-1]))
    mean = collective.all_reduce(wide.sum(-1, keepdim=True)) / width
    squares = collective.all_reduce((wide - mean).square().sum(-1, keepdim=True))
    return functional.relu(inputs - (mean + (squares / width).sqrt() * deviations).to(inputs.dtype))


def split_layers(model: nn.Module, plan: ShardPlan, link: Link) -> None:
    """Wrap or adjust the modules that hold this rank's part by now and are no linear layers."""
    for name, module in list(model.named_modules()):
        role = plan.role(name)
        if role is None:  # also of parts of a module that was wrapped here
            continue
        path, _, leaf = name.rpartition(".")
        parent: Any = model.get_submodule(path)
        match role:
            case "experts":
                setattr(parent, leaf, ReducedExperts(module, link))
            case "width_norm" if hasattr(module, "variance_epsilon"):  # transformers'; C++ sums squares itself
                setattr(parent, leaf, WidthNorm(module, link))
            case "query_key_value" if hasattr(parent, "config"):
                # The modelling code cuts the product by the numbers of heads.
                parent.config = copy.copy(parent.config)
                parent.config.num_attention_heads = plan.local_heads
                parent.num_key_value_heads = plan.local_kv_heads
            case _:
                pass
