"""The device that torch computes on: chosen by a rank, and described for worker/models/backend.py."""

from __future__ import annotations

import importlib.metadata

import torch
from torch.cuda import nccl

from control.errors import DevicesError
from worker.models.served import ServedModel
from worker.selftest import switches


def cpu(model: ServedModel) -> list[str]:
    parts = [f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"]
    return parts if model.is_native else [*parts, _transformers()]


def gpu(model: ServedModel) -> list[str]:
    properties = torch.cuda.get_device_properties(model.device)
    parts = [
        f"{properties.name} sm_{properties.major}{properties.minor}",
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        f"Triton {_version('triton')}",
        _transformers(),
    ]
    if model.collective.name == "nccl":
        parts.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
    off = [name for name in switches.PLAIN if switches.reason_off(name)]
    return [*parts, f"without {', '.join(off)}"] if off else parts


def _transformers() -> str:
    return f"transformers {_version('transformers')}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def use_gpu(device: str) -> None:
    """Compute on the GPU `device` of the form cuda:N. Raises DevicesError where it is absent."""
    index = int(device.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise DevicesError(
            f"device {device} was asked for, but torch sees {count} GPUs on this host; "
            "name other --devices, or allow the CPU with --devices cpu"
        )
    torch.cuda.set_device(index)
