"""The machine and the versions behind a figure."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil


def describe() -> str:
    """Processor, cores, memory, what else keeps it busy, and the versions that matter, in one line."""
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return (
        f"machine: {_processor()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, {versions}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
