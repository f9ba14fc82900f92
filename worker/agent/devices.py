"""The accelerators of this host, found without opening one: an agent must survive a faulty device context."""

from __future__ import annotations

import os
import shutil
import subprocess

from control.placement.membership import DeviceSpace

WITHIN_S = 20.0
MIB = 2**20


def accelerators() -> tuple[str, ...]:
    """`cuda:0`, … for each GPU that the driver lists and CUDA_VISIBLE_DEVICES admits; empty where there is none."""
    visible = _visible()
    if visible is not None:
        return tuple(f"cuda:{index}" for index in range(len(visible)))
    count = sum(line.startswith("GPU ") for line in _asked("-L").splitlines())
    return tuple(f"cuda:{index}" for index in range(count))


def device_memory() -> dict[str, DeviceSpace]:
    """The memory of each of the `accelerators`, as nvidia-smi tells it; without those of which it tells nothing.

    CUDA may number GPUs in another order than the driver. Where they differ in size and CUDA_DEVICE_ORDER does not say
    that it is the same, each counts as the smallest.
    """
    query = "--query-gpu=index,uuid,memory.total,memory.free"
    rows = [_row(line) for line in _asked(query, "--format=csv,noheader,nounits").splitlines()]
    gpus = [row for row in rows if row is not None]
    visible = _visible()
    spaces = {name: space for index, uuid, space in gpus for name in (index, uuid)}
    indices = [index for index, _, _ in gpus] if visible is None else visible
    by_device = {f"cuda:{number}": _found(spaces, name) for number, name in enumerate(indices)}
    spaces_by_device = {device: space for device, space in by_device.items() if space is not None}
    is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({s.total for _, _, s in gpus}) < 2
    if not spaces_by_device or is_ordered or all(name.startswith("GPU-") for name in indices):
        return spaces_by_device
    least = DeviceSpace(
        total=min(space.total for space in spaces_by_device.values()),
        free=min(space.free for space in spaces_by_device.values()),
    )
    return dict.fromkeys(spaces_by_device, least)


def _visible() -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None where it is unset."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return [entry.strip() for entry in visible.split(",") if entry.strip() not in ("", "-1")]


def _asked(*options: str) -> str:
    """The output of nvidia-smi; empty if there is none, or if it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    return subprocess.run([tool, *options], capture_output=True, text=True, timeout=WITHIN_S, check=False).stdout


def _row(line: str) -> tuple[str, str, DeviceSpace] | None:
    """Index, UUID and memory of a GPU; None for a line that is none, and for `[N/A]`."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 4 or not (cells[2].isdigit() and cells[3].isdigit()):
        return None
    return cells[0], cells[1], DeviceSpace(total=int(cells[2]) * MIB, free=int(cells[3]) * MIB)


def _found(spaces: dict[str, DeviceSpace], name: str) -> DeviceSpace | None:
    """By index or UUID, of which the beginning will do, as for CUDA."""
    if name in spaces:
        return spaces[name]
    matches = [space for uuid, space in spaces.items() if uuid.startswith("GPU-") and uuid.startswith(name)]
    return matches[0] if len(matches) == 1 and name.startswith("GPU-") else None
