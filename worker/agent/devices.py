"""The accelerators of this host, found without opening one: an agent must survive a faulty device context."""

from __future__ import annotations

import os
import shutil
import subprocess


def accelerators() -> tuple[str, ...]:
    """`cuda:0`, … for each GPU that the driver lists and CUDA_VISIBLE_DEVICES admits; empty where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
        return tuple(f"cuda:{index}" for index in range(count))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return tuple(f"cuda:{index}" for index in range(count))
