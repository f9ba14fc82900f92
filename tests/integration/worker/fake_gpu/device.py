"""A GPU that is not there: torch's FakeTensorMode has its tensors without their numbers.

An operation over tensors of two devices raises, and so does reading a value on the host. Triton's launches have a
stand-in that checks what a launcher would get; graphs are recorded by running their work.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from worker.engine.torch import graphs
from worker.kv.torch import stores as torch_stores
from worker.tensors import number_type

DEVICE = "cuda:0"

KERNELS = {
    "kv.torch.paged_kernels": ("_decode", "_prefill", "_reduce", "_store"),
    "models.torch.kernels.fused": ("_gated", "_rms_norm", "_rotary"),
}

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void set_guard(int there) {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(there ? &guard : nullptr);
}
"""


class HiddenWait(AssertionError):
    """The host waits for the device in the middle of a step."""


class BadLaunch(AssertionError):
    """A kernel gets what its launcher or its code can't take."""


def build_guard(folder: Path) -> ctypes.CDLL:
    """A device guard that does nothing: a build of torch without CUDA has none, and copies between devices ask for it.
    Raises CalledProcessError or FileNotFoundError."""
    (folder / "guard.cpp").write_text(GUARD)
    torch_folder, compiler = Path(torch.__path__[0]), shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", "guard.cpp"]
    command += ["-o", "guard.so", f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=50)
    return ctypes.CDLL(str(folder / "guard.so"))


class Launch:
    """In the place of a Triton kernel: `kernel[grid](…)` checks devices, types, density and the grid."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if not all(type(size) is int and 0 < size < 2**31 for size in grid):
            raise BadLaunch(f"{self._name}: grid {grid}")
        return self._launch

    def _launch(self, *positional: Any, **named: Any) -> None:
        self._seen.append(self._name)
        tensors = [one for one in (*positional, *named.values()) if isinstance(one, Tensor)]
        for one in tensors:
            if str(one.device) != DEVICE:
                raise BadLaunch(f"{self._name}: a tensor {tuple(one.shape)} is on {one.device}")
            if one.dim() and one.stride(-1) != 1:
                raise BadLaunch(f"{self._name}: a tensor {tuple(one.shape)} has strides {one.stride()}")
        partial = named.get("partial", positional[0] if self._name == "_reduce" else None)
        kinds = {number_type(one.dtype).name for one in tensors if one.is_floating_point() and one is not partial}
        if len(kinds) != 1 or not kinds <= torch_stores.KERNEL_TYPES:
            raise BadLaunch(f"{self._name}: types {kinds}")
        if partial is not None and partial.dtype != torch.float32:
            raise BadLaunch(f"{self._name}: sums in {partial.dtype}")
        if any(one.dtype not in (torch.int32, torch.int64) for one in tensors if not one.is_floating_point()):
            raise BadLaunch(f"{self._name}: integers of {[one.dtype for one in tensors]}")


class Waits(TorchDispatchMode):
    """Raises HiddenWait for a copy between host and device that the host waits for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
        result = func(*args, **(kwargs or {}))
        # In inference mode `to` arrives as it was called, elsewhere as `_to_copy`.
        if func.overloadpacket.__name__ in ("to", "_to_copy", "copy_"):
            source = given["src" if "src" in given else "self"].device
            if source.type != result.device.type and not given.get("non_blocking"):
                raise HiddenWait(f"{func} from {source} to {result.device} is waited for")
        return result


class Recorded:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class NoEvent:
    def record(self) -> None: ...


@contextmanager
def fake_gpu(guard: ctypes.CDLL) -> Iterator[list[str]]:
    """Within it `DEVICE` is a GPU; yields the names of the kernels that are launched."""
    seen: list[str] = []
    with ExitStack() as stack:
        guard.set_guard(1)
        stack.callback(guard.set_guard, 0)
        for module, names in KERNELS.items():
            for name in names:
                place = importlib.import_module(f"worker.{module}")
                stack.enter_context(mock.patch.object(place, name, Launch(name, seen)))
        decode = importlib.import_module("worker.kv.torch.paged_kernels")
        for place, name, stand_in in (
            (decode, "_processors", lambda device: 132),
            (graphs, "CudaCapture", lambda device: Recorded),
            (graphs.DecodeGraphs.__init__, "__defaults__", ((1, 2, 4),)),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "mem_get_info", lambda device: (2**34, 2**34)),
            (torch.cuda, "Event", NoEvent),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield seen
