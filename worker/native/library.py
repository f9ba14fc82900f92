"""The compiled library: its kinds of weights, its loading, its threads, and the structs that layer.h has as well; no
torch."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import numpy as np
from numpy.typing import NDArray

from worker.native import compiled
from worker.native.compiled import digest
from worker.native.host import SOURCE, SWITCH, thread_count
from worker.selftest import switches
from worker.selftest.shapes import Shapes

PLAIN = ("float32", "bfloat16", "float16", "int8")
BLOCKS = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("mxfp4", "iq4_nl", "iq4_xs", "iq3_s", "tq2_0"),
)
GROUPED = ("e4m3", "int4", "e2m1")
KINDS = (*PLAIN, *BLOCKS, *GROUPED)
"""Of packed weights that the library multiplies, in the order of their numbers there (layer.h)."""
NUMBERS = {name: number for number, name in enumerate(KINDS)}


def bits_of(kinds: Iterable[str]) -> int:
    """The set of `kinds` as bits by number, with float32, which the library's own check needs."""
    bits = 1
    for kind in kinds:
        bits |= 1 << NUMBERS[kind]
    return bits


ALL = bits_of(KINDS)


class KindMissing(Exception):
    """A library was compiled without a kind of weights."""


def load_library(kinds: Iterable[str] | None = None, shapes: Shapes | None = None) -> ctypes.CDLL | None:
    """The loaded library, which has at least `kinds`, or all, and passed its check with `shapes`; None where it can't
    be compiled, or isn't wanted. May take seconds the first time, and as many more the fewer kinds were asked for
    before."""
    if os.environ.get(SWITCH) == "0" or switches.reason_off("cpp"):
        return None
    parts = ALL if kinds is None else bits_of(kinds)
    checked = () if shapes is None else shapes.on_cpu
    loaded = compiled.load(SOURCE, for_this_processor=True, parts=parts, shapes=checked)
    if loaded is not None:
        declare_products(loaded)
        _declare_steps(loaded)
    return loaded


def reason_missing() -> str:
    """The reason why `load_library` returned None, as part of a sentence; "" if it did not, or was not called."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return switches.reason_off("cpp") or compiled.reason(SOURCE)


def declare_products(loaded: ctypes.CDLL) -> None:
    """The types of the functions that pack weights and multiply."""
    address = c_void_p
    number = c_int64
    loaded.furrow_kinds.restype = c_uint32
    loaded.furrow_build.restype = ctypes.c_char_p
    loaded.furrow_pool.argtypes, loaded.furrow_pool.restype = [c_int32], c_void_p
    loaded.furrow_pool_end.argtypes, loaded.furrow_pool_end.restype = [address], None
    loaded.furrow_pool_progress.argtypes, loaded.furrow_pool_progress.restype = [address], address
    loaded.furrow_matrix_bytes.argtypes, loaded.furrow_matrix_bytes.restype = [c_int32, number, number], number
    loaded.furrow_pack.argtypes = [address, address, number, address, number, number]
    loaded.furrow_pack.restype = None
    loaded.furrow_look_up.argtypes, loaded.furrow_look_up.restype = [address, address, number, address], None
    loaded.furrow_product.argtypes = [address, address, address, number, address, address]
    loaded.furrow_product.restype = None
    loaded.furrow_product_room.argtypes, loaded.furrow_product_room.restype = [address, number], number


def _declare_steps(loaded: ctypes.CDLL) -> None:
    """The types of the functions that quantise weights and step through a model."""
    address = c_void_p
    number = c_int64
    loaded.furrow_quantize.argtypes = [address, c_int32, address, number, number, address]
    loaded.furrow_quantize.restype = number
    loaded.furrow_step_room.argtypes, loaded.furrow_step_room.restype = [address] * 3, number
    loaded.furrow_step.argtypes = [address] * 4
    loaded.furrow_best.argtypes, loaded.furrow_best.restype = [address, address, number, number, number, address], None
    loaded.furrow_sample.argtypes, loaded.furrow_sample.restype = [address, address, number], None
    loaded.furrow_guessed_floats.argtypes, loaded.furrow_guessed_floats.restype = [address, number], number
    loaded.furrow_replay_room.argtypes, loaded.furrow_replay_room.restype = [address] * 3, number
    loaded.furrow_replay.argtypes, loaded.furrow_replay.restype = [address] * 4, None
    loaded.furrow_check.argtypes, loaded.furrow_check.restype = [address, number], ctypes.c_char_p


# In place of a token (best.h, sample.h).
NOT_FINITE = -1
NO_TOKEN_LEFT = -2


class Threads:
    """The `count` threads of one model."""

    def __init__(self, loaded: ctypes.CDLL, count: int) -> None:
        self.library = loaded
        self.count = count
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
        return f"C++ {digest(SOURCE)}, {built}, {' '.join(platform.libc_ver())}"

    def best_tokens(self, logits: NDArray[np.float32]) -> list[int]:
        """The index of the largest of each row of `logits` [rows, vocabulary], the lowest of equals; NOT_FINITE where
        one of the row is NaN or infinity. Each row lies in one piece."""
        rows, vocabulary = logits.shape
        assert logits.dtype == np.float32 and (logits.size == 0 or vocabulary == 1 or logits.strides[1] == 4)
        tokens = (c_int64 * rows)()
        self.library.furrow_best(self.address, logits.ctypes.data, rows, logits.strides[0] // 4, vocabulary, tokens)
        return list(tokens)

    def sample(self, rows: ctypes.Array[Sampled]) -> None:
        """Set the results of `rows`, each by one thread."""
        self.library.furrow_sample(self.address, rows, len(rows))

    def number(self, kind: str) -> int:
        """The number in the library of the kind with this name (KINDS). Raises KindMissing."""
        number = NUMBERS[kind]
        if not self.library.furrow_kinds() >> number & 1:
            raise KindMissing(f"the C++ library was compiled without weights in {kind}")
        return number

    def __del__(self) -> None:
        self.library.furrow_pool_end(self.address)


def threads_here(kinds: Iterable[str] | None = None, shapes: Shapes | None = None) -> Threads | None:
    """The threads of one model, for products of its `shapes` with weights of `kinds`, or of all; None where they can't
    be compiled or aren't wanted."""
    loaded = load_library(kinds, shapes)
    return None if loaded is None else Threads(loaded, thread_count())


SILU, GELU_TANH, CLAMPED_SWIGLU, RELU_SQUARED, XIELU = range(5)
EACH_HEAD, EACH_TURNED_HEAD, ALL_HEADS = range(3)
BOTH, KEYS_ALONE, NEITHER = range(3)
DELTA_RULE, SHORT_CONVOLUTION, MAMBA = range(3)
WHOLE_VECTORS = 16
"""A head's width, and those of a recurrent layer's keys and values, must be multiples of this many numbers."""


MOST_MATRICES = 4
MOST_STREAMS = 8


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
        *((name, c_float) for name in ("positive", "negative", "linear", "least", "scale")),
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
        ("offset", c_float),
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
        ("least_sum", c_float),
        ("sparse_mixer", c_int32),
        ("jitter", c_float),
        ("scale", c_float),
        ("expert_scales", c_void_p),
        ("shared", c_int32),
        ("shared_gate", c_int32),
        ("weighted_inputs", c_int32),
        ("before_router", Norm),
        ("before", Norm),
        ("after", Norm),
    ]


class Place(ctypes.Structure):
    _fields_ = [("first", c_int64), ("step", c_int64)]


class RecurrentLayer(ctypes.Structure):
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
        ("gate_last", c_int32),
        ("output_scales", c_void_p),
        ("out", Linear),
        ("out_scale", c_float),
    ]


class Latent(ctypes.Structure):
    _fields_ = [
        ("down", Linear),
        ("queries", Linear),
        ("query", Norm),
        ("shared", Norm),
        ("keys", c_void_p),
        ("values", c_void_p),
        *((name, c_int64) for name in ("query_rank", "rank", "turned", "plain", "value_dim")),
    ]


class Alternation(ctypes.Structure):
    _fields_ = [
        ("routed", Norm),
        *((name, c_void_p) for name in ("router", "prediction", "correction", "output_scale")),
        ("narrow", Linear),
        ("widen", Linear),
        ("widened", Norm),
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
        ("alternation", c_void_p),
        ("sparse", c_int32),
        ("cutoff", c_float),
        ("whole_inner", c_int64),
        ("latent", c_void_p),
        ("gate", Gate),
        ("input_gate", Linear),
        ("input_projection", Linear),
        ("after_input", Norm),
        ("attended_scale", c_float),
        ("fed_scale", c_float),
        ("scale", c_float),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("chunk", c_int64),
        ("rotary", c_int64),
        ("mixture", c_int64),
        ("recurrent", c_int64),
        ("shared_heads", c_int64),
        ("head_dim", c_int64),
        ("value_dim", c_int64),
        ("stored", c_int32),
        ("head_gates", c_int32),
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
        ("recurrent", c_void_p),
        ("recurrent_count", c_int64),
        ("cached", c_int32),
        ("output_gate", c_int32),
        ("attention_scale", c_float),
        ("attention_cap", c_float),
        ("logit_cap", c_float),
        ("inputs", LayerInputs),
        ("streams", c_int64),
        ("active", c_int64),
        ("into_streams", c_void_p),
        ("out_of_streams", c_void_p),
        ("logit_scale", c_float),
        ("last", Norm),
        ("head", Linear),
    ]


class Sampled(ctypes.Structure):
    """A row to sample, with its results (sample.h)."""

    _fields_ = [
        ("logits", c_void_p),
        ("vocabulary", c_int64),
        ("context", c_void_p),
        ("output", c_void_p),
        ("biased", c_void_p),
        ("forbidden", c_void_p),
        ("context_count", c_int64),
        ("output_count", c_int64),
        ("bias_count", c_int64),
        ("forbidden_count", c_int64),
        ("reduced", c_void_p),
        ("reduced_count", c_int64),
        ("reductions", c_void_p),
        ("biases", c_void_p),
        ("allowed", c_void_p),
        ("allowed_bytes", c_int64),
        ("key", c_uint64),
        ("temperature", c_float),
        ("repetition", c_float),
        ("presence", c_float),
        ("frequency", c_float),
        ("top_p", c_double),
        ("min_p", c_double),
        ("typical_p", c_double),
        ("top_n_sigma", c_double),
        ("xtc_threshold", c_double),
        ("coldest", c_double),
        ("hottest", c_double),
        ("exponent", c_double),
        ("dynamic", c_int64),
        ("top_k", c_int64),
        ("forced", c_int64),
        ("ranked", c_int64),
        ("ranks", c_void_p),
        ("rankings", c_void_p),
        ("token", c_int64),
        ("logprob", c_float),
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
