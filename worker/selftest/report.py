"""A self-test: every trial of a device on some shapes, with rates; records that ranks read, and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import torch

from control.errors import DevicesError
from worker.selftest import choice, records, runner, switches
from worker.selftest.choice import COLLECTIVES, KERNELS
from worker.selftest.records import Circumstances, Record, TrialResult
from worker.selftest.runner import TRIALS, TrialTask
from worker.selftest.shapes import Shapes
from worker.selftest.trial import DeviceLimits, measured

TOKENS = {"cuda": 2048, "cpu": 128}
"""Rows of a case, and positions of a context: on a GPU fewer would measure the launch of a kernel."""


class SelftestReport(msgspec.Struct, frozen=True):
    device: str
    versions: dict[str, str]
    limits: DeviceLimits
    results: list[TrialResult]

    @property
    def off(self) -> dict[str, str]:
        """Kernels that are switched off from now on → how a model is served without them."""
        return {result.kernel: switches.PLAIN[result.kernel] for result in self.results if not result.works}


def selftest(
    device: str, shapes: Iterable[Shapes], tell: Callable[[TrialResult], None] = lambda result: None
) -> SelftestReport:
    """Try everything on `device` and keep the verdicts. Raises DevicesError for a device that is absent."""
    where = present(device)
    dtype = "float32" if where.type == "cpu" else "bfloat16"
    limits = measured(where, dtype)
    results = list[TrialResult]()
    subject: Circumstances | None = None
    for shape in shapes:
        resolved = msgspec.structs.replace(shape, dtype=dtype) if shape.dtype == "auto" else shape
        subject = _tried(where, resolved, KERNELS[where.type], results, tell)
    subject = _tried(where, choice.collective_shapes(str(where)), COLLECTIVES[where.type], results, tell)
    return SelftestReport(subject.device, subject.versions, limits, results)


def _tried(
    device: torch.device,
    shapes: Shapes,
    names: tuple[str, ...],
    results: list[TrialResult],
    tell: Callable[[TrialResult], None],
) -> Circumstances:
    trials = {name: TRIALS[name] for name in names}
    fresh = runner.run(TrialTask(str(device), shapes, TOKENS[device.type], True, trials), tell)
    subject = choice.subject_of(str(device), shapes, names)
    records.write(Record(subject, fresh))
    results += fresh
    return subject


def present(device: str) -> torch.device:
    """The device. Raises DevicesError where it is absent or unknown."""
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise DevicesError(f"device {device!r} is unknown; name cpu, or cuda:0") from error
    if where.type not in KERNELS:
        raise DevicesError(f"there are no kernels for device {device!r}; name cpu, or cuda:0")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise DevicesError(
            f"device {device} is absent: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs on this host. "
            "Install a build of torch for this GPU, or name --device cpu"
        )
    return torch.device("cuda", where.index or 0) if where.type == "cuda" else where


def rows_of(report: SelftestReport) -> list[list[str]]:
    """The table: a header, then a row for each result."""
    rows = [["kernel", "shape", "dtype", "verdict", "time", "rate", "of the limit"]]
    for result in report.results:
        rate, share = _rate(result, report.limits)
        time = f"{result.seconds * 1e6:,.0f} us" if result.seconds else ""
        rows.append([result.kernel, result.shape, result.dtype, result.reason, time, rate, share])
    return rows


def _rate(result: TrialResult, limits: DeviceLimits) -> tuple[str, str]:
    if result.seconds and result.teraflops:
        rate = result.teraflops / result.seconds
        return f"{rate:.2f} TFLOP/s", f"{rate / limits.teraflops:.0%}"
    if result.seconds and result.gigabytes:
        rate = result.gigabytes / result.seconds
        return f"{rate:,.1f} GB/s", f"{rate / limits.gigabytes_per_s:.0%}"
    return "", ""
