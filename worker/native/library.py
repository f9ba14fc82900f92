"""The structs of the compiled library, which layer.h has as well, and the threads of a model in it."""

from __future__ import annotations

import ctypes
import platform
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p

import structlog
import torch

from worker.native.compiled import source_digest
from worker.native.host import SOURCE
from worker.native.kinds import NUMBERS

log = structlog.get_logger()

SILU, GELU_TANH, CLAMPED_SWIGLU, RELU_SQUARED, XIELU = range(5)
EACH_HEAD, EACH_TURNED_HEAD, ALL_HEADS = range(3)
BOTH, KEYS_ALONE, NEITHER = range(3)
DELTA_RULE, SHORT_CONVOLUTION, MAMBA = range(3)
WHOLE_VECTORS = 16
"""A head's width, and those of a recurrent layer's keys and values, must be multiples of this many numbers."""


class KindMissing(Exception):
    """A library was compiled without a kind of weights."""


MOST_MATRICES = 3


class Matrix(ctypes.Structure):
    _fields_ = [
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("first", c_int64),
        ("outputs", c_int64),
        ("kind", c_int32),
        ("zeros", c_void_p),
        ("group", c_int64),
    ]


class Linear(ctypes.Structure):
    _fields_ = [
        ("matrices", Matrix * MOST_MATRICES),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("count", c_int32),
    ]


class Gate(ctypes.Structure):
    _fields_ = [
        ("activation", c_int32),
        ("slope", c_float),
        ("limit", c_float),
        ("alone", c_int32),
        *((name, c_float) for name in ("positive", "negative", "linear", "least")),
    ]


class Norm(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("epsilon", c_float), ("centered", c_int32), ("bias", c_void_p)]


class Rotary(ctypes.Structure):
    _fields_ = [
        ("frequencies", c_void_p),
        ("scale", c_float),
        ("dim", c_int64),
        ("neighbours", c_int32),
        ("growth", c_float),
        ("period", c_float),
    ]


class Expert(ctypes.Structure):
    _fields_ = [("gate_up", Linear), ("down", Linear)]


class Mixture(ctypes.Structure):
    _fields_ = [
        ("router", Linear),
        ("experts", c_void_p),
        ("count", c_int64),
        ("chosen", c_int64),
        ("sigmoid", c_int32),
        ("correction", c_void_p),
        ("groups", c_int64),
        ("chosen_groups", c_int64),
        ("normalized", c_int32),
        ("scale", c_float),
        ("expert_scales", c_void_p),
        ("shared", c_int32),
        ("shared_gate", c_int32),
        ("before_router", Norm),
        ("before", Norm),
        ("after", Norm),
    ]


class Place(ctypes.Structure):
    _fields_ = [("first", c_int64), ("step", c_int64)]


class Delta(ctypes.Structure):
    _fields_ = [
        ("projections", Linear),
        ("rates", Linear),
        *((name, Place) for name in ("query", "key", "value", "gate", "learning", "keeping")),
        ("filter_bias", c_void_p),
        ("filter", c_void_p),
        ("decay", c_void_p),
        ("decay_bias", c_void_p),
        ("skip", c_void_p),
        ("norm", Norm),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps", "state")),
        ("kind", c_int32),
        ("tiled", c_int32),
        *((name, c_int64) for name in ("norm_groups", "first_group", "norm_width")),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("before_attention", Norm),
        ("after_attention", Norm),
        ("before_feed_forward", Norm),
        ("after_feed_forward", Norm),
        ("query", Norm),
        ("key", Norm),
        ("head_norms", c_int32),
        ("head_norm_step", c_int64),
        ("parallel", c_int32),
        ("beside", c_int32),
        ("after_network", Norm),
        ("query_key_value", Linear),
        ("attention_out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("gate", Gate),
        ("input_gate", Linear),
        ("input_projection", Linear),
        ("after_input", Norm),
        ("scale", c_float),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("rotary", c_int64),
        ("mixture", c_int64),
        ("delta", c_int64),
        ("shared_heads", c_int64),
        ("head_dim", c_int64),
        ("stored", c_int32),
        ("value", Norm),
        ("slab", c_int64),
        ("cache", c_int64),
    ]


class LayerInputs(ctypes.Structure):
    _fields_ = [
        ("width", c_int64),
        ("projection", Linear),
        ("norm", Norm),
        ("projected_scale", c_float),
        ("scale", c_float),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        ("depth", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("rotaries", c_void_p),
        ("rotary_count", c_int64),
        ("mixtures", c_void_p),
        ("mixture_count", c_int64),
        ("deltas", c_void_p),
        ("delta_count", c_int64),
        ("output_gate", c_int32),
        ("attention_scale", c_float),
        ("attention_cap", c_float),
        ("logit_cap", c_float),
        ("inputs", LayerInputs),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("last", Norm),
        ("head", Linear),
    ]


class Slab(ctypes.Structure):
    _fields_ = [("keys", c_void_p), ("values", c_int64), ("layer_stride", c_int64), ("head_stride", c_int64)]


class Span(ctypes.Structure):
    _fields_ = [
        ("slabs", c_int64),
        ("first", c_int64),
        ("count", c_int64),
        ("offset", c_int64),
        ("state", c_void_p),
        ("guesses", c_int64),
        ("first_guess", c_int64),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("spans", c_void_p),
        ("span_count", c_int64),
        ("slabs", c_void_p),
        ("slab_count", c_int64),
        ("positions", c_void_p),
        ("hidden", c_void_p),
        ("layer_inputs", c_void_p),
        ("tokens", c_int64),
        ("sampled", c_void_p),
        ("sampled_count", c_int64),
        ("logits", c_void_p),
        ("reduce", c_void_p),
        ("ranks", c_int64),
        ("group", c_void_p),
        ("axes", c_void_p),
        ("axis_of", c_void_p),
        ("marked", c_void_p),
        ("marked_count", c_int64),
        ("added", c_void_p),
        ("added_layers", c_int64),
        ("ends", c_void_p),
        ("guessed", c_void_p),
        ("guess_count", c_int64),
    ]


class Threads:
    """The threads of one model, as many as torch has here when this is made."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.library, self.count = loaded, torch.get_num_threads()
        self.address: int = loaded.furrow_pool(self.count)
        self._progress = c_uint64.from_address(loaded.furrow_pool_progress(self.address))

    @property
    def progress(self) -> int:
        """A number that changes with every part of a job that is done; for any thread, while a job runs too."""
        return self._progress.value

    @property
    def kernels(self) -> str:
        """The library's source, instructions, compiler and mathematical functions: all that its bits depend on."""
        built = self.library.furrow_build().decode()
        return f"C++ {source_digest(SOURCE)}, {built}, {' '.join(platform.libc_ver())}"

    def number(self, kind: str) -> int:
        """The number in the library of the kind with this name (kinds.py). Raises KindMissing."""
        number = NUMBERS[kind]
        if not self.library.furrow_kinds() >> number & 1:
            raise KindMissing(f"the C++ library was compiled without weights in {kind}")
        return number

    def __del__(self) -> None:
        self.library.furrow_pool_end(self.address)
