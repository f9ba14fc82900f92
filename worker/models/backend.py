"""The description of a loaded shard by all that the bits of its logits depend on, besides the weights."""

from __future__ import annotations

import importlib.metadata

import torch
from torch.cuda import nccl

from control.replies import RankBackend
from worker.models.layers.linear import NativeLinear
from worker.models.served import ServedModel
from worker.selftest import switches


def describe(model: ServedModel) -> RankBackend:
    """This rank's part of `control.records.backend.Backend`."""
    return RankBackend(
        dtype=str(model.dtype).removeprefix("torch."),
        kernels="; ".join(_cpu(model) if model.device.type == "cpu" else _gpu(model)),
        collective=model.collective.name,
        batch_invariant=model.batch_invariant,
    )


def _cpu(model: ServedModel) -> list[str]:
    """torch has a part in every model: an embedding, an image tower, the whole forward with its sampling."""
    threads = next((part.threads for part in model.parts() if isinstance(part, NativeLinear)), None)
    found = [] if threads is None else [threads.kernels]
    found.append(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
    return found if model.is_native else [*found, _transformers()]


def _gpu(model: ServedModel) -> list[str]:
    properties = torch.cuda.get_device_properties(model.device)
    found = [
        f"{properties.name} sm_{properties.major}{properties.minor}",
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        f"Triton {_version('triton')}",
        _transformers(),
    ]
    if model.collective.name == "nccl":
        found.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
    off = [name for name in switches.PLAIN if switches.reason_off(name)]
    return [*found, f"without {', '.join(off)}"] if off else found


def _transformers() -> str:
    return f"transformers {_version('transformers')}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
