"""The choice of kernels for a model: by the verdicts of this kind of device, which are made where there are none."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from control import cache as cache_files
from worker.selftest import records, runner, switches
from worker.selftest.records import Circumstances, Record, TrialResult
from worker.selftest.runner import TRIALS, TrialTask
from worker.selftest.shapes import DEFAULT, Shapes, of_config

log = structlog.get_logger()

TOKENS = 70
"""Rows of a trial before a load: more than a tile of a prompt has, and than keys are read at once."""
KERNELS = {
    "cuda": tuple(name for name in TRIALS if name.startswith("triton") or name == "graphs"),
    "cpu": ("cpp",),
}
COLLECTIVES = {"cuda": ("collective.nccl",), "cpu": ("collective.native",)}
"""The kernels of a device, by its type; collectives are tried on the same shapes for all models."""
_WORKER = Path(__file__).parents[1]
_SOURCES = (
    "kv/base.py",
    "kv/torch",
    "models/torch/kernels",
    "models/torch/trials.py",
    "collective",
    "native",
    "selftest",
    "engine/torch",
)


def choose(config: dict[str, Any], dtype: str, device: str, tp: int, tell: Callable[[], None] = lambda: None) -> None:
    """Switch off the kernels that fail on this device with a rank's shapes of this model. A GPU tries them where no
    record says how they did; that may take a minute, and `tell` is called with each result. On a CPU the C++ library is
    checked with the model's shapes when it is loaded, so only a record of `furrow selftest` is asked."""
    for name in switches.unknown_names():
        log.warning("unknown kernel", name=name, known=", ".join(switches.PLAIN), action="choose_kernels")
    _choose(device, of_config(config, dtype, tp), KERNELS[kind_of(device)], tell)


def choose_collective(device: str) -> None:
    """Switch off the collectives that fail on this device, as `choose` does; before a rank joins its group."""
    _choose(device, collective_shapes(device), COLLECTIVES[kind_of(device)], lambda: None)


def kind_of(device: str) -> str:
    """The type of a device that torch names so: "cuda" of "cuda:0"."""
    return device.partition(":")[0]


def collective_shapes(device: str) -> Shapes:
    return msgspec.structs.replace(DEFAULT[0], dtype="float32" if device == "cpu" else "bfloat16")


def _choose(device: str, shapes: Shapes, names: tuple[str, ...], tell: Callable[[], None]) -> None:
    subject = subject_of(device, shapes, names)
    record = records.read(subject)
    if record is None and kind_of(device) == "cuda":
        record = _tried(subject, TrialTask(device, shapes, TOKENS, False, {name: TRIALS[name] for name in names}), tell)
    off = {} if record is None else record.off()
    switches.switch_off(off, names)
    for name, reason in off.items():
        log.warning(
            "kernel switched off",
            kernel=name,
            reason=reason,
            instead=switches.PLAIN[name],
            remedy="run `furrow selftest` and report its table",
            action="choose_kernels",
        )


def _tried(subject: Circumstances, task: TrialTask, tell: Callable[[], None]) -> Record | None:
    with _locked():  # the ranks of a host start together: one tries, the others read
        record = records.read(subject)
        if record is not None:
            return record
        log.info("kernels are tried", device=subject.device, action="choose_kernels")

        def on_result(result: TrialResult) -> None:
            tell()

        try:
            record = Record(subject, runner.run(task, on_result))
        except (runner.NotTried, OSError) as error:
            log.warning("kernels could not be tried", reason=str(error), action="choose_kernels")
            return None
        records.write(record)
        return record


@contextlib.contextmanager
def _locked() -> Generator[None]:
    """The lock of the verdicts; none where their folder can't be made or written to."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(cache_files.locked(cache_files.made_folder(records.KIND)))
        yield


def subject_of(device: str, shapes: Shapes, names: tuple[str, ...]) -> Circumstances:
    """The circumstances of a verdict on these kernels on `device`."""
    versions = {"kernels": _sources()}
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if kind_of(device) == "cuda":
        import torch  # only here: a CPU is described without

        properties = torch.cuda.get_device_properties(device)
        versions["cuda"] = str(torch.version.cuda)
        versions["driver"] = _driver()
        name = f"{properties.name} sm_{properties.major}{properties.minor}"
    else:
        name = _processor()
    return Circumstances(name, versions, {"kernels": " ".join(names), **shapes.described()})


def _driver() -> str:
    with contextlib.suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    return "unknown"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _sources() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        place = _WORKER / name
        files = (
            [place]
            if place.is_file()
            else sorted(path for path in place.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
        )
        for path in files:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
