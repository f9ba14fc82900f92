"""torch's objects in files of packed weights: tensors as arrays over the same memory, types and devices by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.tensors import as_array, as_tensor
from worker.weights.structure import FORMS, Form


def register() -> None:
    """Let structures have torch's objects."""
    version = str(torch.__version__)
    for form in (
        Form("parameter", nn.Parameter, as_array, _parameter, version),
        Form("tensor", Tensor, as_array, as_tensor, version),
        Form("torch.dtype", torch.dtype, lambda dtype: str(dtype).removeprefix("torch."), _dtype, version),
        Form("torch.device", torch.device, str, torch.device, version),
    ):
        FORMS[form.name] = form


def _parameter(array: Any) -> nn.Parameter:
    return nn.Parameter(as_tensor(array), requires_grad=False)


def _dtype(name: str) -> torch.dtype:
    """Raises TypeError for another word."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no type of torch's numbers")
    return dtype
