"""The description of a loaded shard by all that the bits of its logits depend on, besides the weights."""

from __future__ import annotations

import importlib.metadata

import numpy as np

from control.replies import RankBackend
from worker.models.served import ServedModel
from worker.selftest import switches


def describe(model: ServedModel) -> RankBackend:
    """This rank's part of `control.records.backend.Backend`."""
    return RankBackend(
        dtype=model.dtype.name,
        kernels="; ".join(_cpu(model) if model.device == "cpu" else _gpu(model)),
        collective=model.collective.name,
        batch_invariant=model.batch_invariant,
    )


def _cpu(model: ServedModel) -> list[str]:
    """numpy samples. torch has the whole forward, or a part: an image tower, a pooler."""
    parts = [] if model.kernels is None else [model.kernels]
    parts.append(f"numpy {np.__version__}")
    if model.uses_torch:
        import torch  # only here: it was imported for the model

        parts.append(f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
    return parts if model.is_native else [*parts, _transformers()]


def _gpu(model: ServedModel) -> list[str]:
    import torch  # only here: it was imported for the model
    from torch.cuda import nccl

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
