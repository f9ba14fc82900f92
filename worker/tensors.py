"""Between torch's tensors and numpy's arrays, over the same memory.

Arrays are the form of everything that C++ reads; tensors are that of torch's models: GPUs, encoders, towers of images
and the float64 reference. A type of numbers is numpy's, with bfloat16 and the floats of 8 bits from ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from numpy.typing import NDArray
from torch import Tensor

_WITHOUT_BRIDGE = {np.dtype(bfloat16): np.uint16, np.dtype(float8_e4m3fn): np.uint8, np.dtype(float8_e5m2): np.uint8}
"""Types that torch and numpy do not exchange → whole numbers of the same size, which they do."""


def torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    """torch's type of the same numbers. Raises AttributeError where it has none."""
    return getattr(torch, dtype.name)


def number_type(dtype: torch.dtype) -> np.dtype[Any]:
    """numpy's type of the same numbers. Raises TypeError where it has none."""
    return np.dtype(str(dtype).removeprefix("torch."))


def as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor on the CPU over the array's memory, with its shape and strides."""
    bits = _WITHOUT_BRIDGE.get(array.dtype)
    if bits is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(bits)).view(torch_type(array.dtype))


def as_array(tensor: Tensor) -> NDArray[Any]:
    """An array over the memory of a tensor on the CPU, with its shape and strides."""
    dtype = number_type(tensor.dtype)
    bits = _WITHOUT_BRIDGE.get(dtype)
    if bits is None:
        return tensor.detach().numpy()
    return tensor.detach().view(getattr(torch, np.dtype(bits).name)).numpy().view(dtype)


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` on the device, [len(values)]; unlike a tensor that is made there, without waiting for what runs."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
