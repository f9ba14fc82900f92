"""The library of the C++ products and forwards, compiled with the kinds of weights that a model has; no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from ctypes import c_int32, c_int64, c_uint32, c_void_p

from worker.native import compiled
from worker.native.host import SOURCE, SWITCH
from worker.native.kinds import ALL, bits_of
from worker.selftest import switches
from worker.selftest.shapes import Shapes


def library(kinds: Iterable[str] | None = None, shapes: Shapes | None = None) -> ctypes.CDLL | None:
    """The loaded library, which has at least `kinds`, or all, and passed its check with `shapes`; None where it can't
    be compiled, or isn't wanted. May take seconds the first time, and as many more the fewer kinds were asked for
    before."""
    if os.environ.get(SWITCH) == "0" or switches.reason_off("cpp"):
        return None
    parts = ALL if kinds is None else bits_of(kinds)
    checked = () if shapes is None else shapes.on_cpu
    loaded = compiled.library(SOURCE, for_this_processor=True, parts=parts, shapes=checked)
    if loaded is not None:
        declare_products(loaded)
        _declare_steps(loaded)
    return loaded


def reason_missing() -> str:
    """Why `library` returned None, as part of a sentence; "" where it did not, or was not called."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return switches.reason_off("cpp") or compiled.reason(SOURCE)


def declare_products(loaded: ctypes.CDLL) -> None:
    """The types of the functions that pack weights and multiply."""
    address, number = c_void_p, c_int64
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
    address, number = c_void_p, c_int64
    loaded.furrow_quantize.argtypes = [address, c_int32, address, number, number, address]
    loaded.furrow_quantize.restype = number
    loaded.furrow_step_room.argtypes, loaded.furrow_step_room.restype = [address] * 3, number
    loaded.furrow_step.argtypes = [address] * 4
    loaded.furrow_guessed_floats.argtypes, loaded.furrow_guessed_floats.restype = [address, number], number
    loaded.furrow_replay_room.argtypes, loaded.furrow_replay_room.restype = [address] * 3, number
    loaded.furrow_replay.argtypes, loaded.furrow_replay.restype = [address] * 4, None
    loaded.furrow_check.argtypes, loaded.furrow_check.restype = [address, number], ctypes.c_char_p
