"""Arrays and tensors share memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from worker.tensors import as_array, as_tensor, number_type, torch_type

TYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int8", "uint8", "bool")


@pytest.mark.parametrize("name", TYPES)
def test_both_ways_share_memory_shape_and_strides(name: str) -> None:
    tensor = torch.arange(12).to(getattr(torch, name)).view(3, 4).t()
    array = as_array(tensor)
    assert array.dtype == np.dtype(name) and array.shape == (4, 3)
    assert array.ctypes.data == tensor.data_ptr()
    back = as_tensor(array)
    assert back.dtype == tensor.dtype and back.stride() == tensor.stride() and back.data_ptr() == tensor.data_ptr()
    assert back.float().tolist() == tensor.float().tolist() == array.astype(np.float32).tolist()


def test_types_are_found_by_name() -> None:
    assert torch_type(np.dtype(ml_dtypes.bfloat16)) == torch.bfloat16
    assert number_type(torch.float8_e4m3fn) == np.dtype(ml_dtypes.float8_e4m3fn)
