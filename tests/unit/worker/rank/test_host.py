"""A host's devices as agent and ranks find them; and those that they refuse."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from control.errors import DevicesError
from control.redis.connection import connect
from worker.agent.devices import accelerators, device_memory
from worker.rank.address import rendezvous_address
from worker.rank.exit_codes import LOAD_FAILED, REFUSED, STOPPED, STUCK, describe, poison_kind
from worker.rank_process import check_device


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put an nvidia-smi on the path that lists what the test says."""

    def install(listing: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'E'\n{listing}\nE\n")
        tool.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_gpus_are_those_that_the_driver_lists(driver: Callable[[str], None]) -> None:
    """One device per GPU line; the instances below a partitioned GPU are not further GPUs."""
    driver("GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)")
    assert accelerators() == ("cuda:0", "cuda:1")


def test_a_driver_that_finds_nothing_means_none(driver: Callable[[str], None]) -> None:
    """A message instead of a list is no GPU."""
    driver("No devices were found")
    assert accelerators() == ()


@pytest.mark.parametrize(
    ("visible", "devices"), [("2,5", ("cuda:0", "cuda:1")), ("", ()), ("-1", ()), ("GPU-1", ("cuda:0",))]
)
def test_what_is_made_visible_counts(
    driver: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, visible: str, devices: tuple[str, ...]
) -> None:
    """CUDA_VISIBLE_DEVICES admits and renumbers, as torch does."""
    driver("GPU 0: one\nGPU 1: two\nGPU 2: three")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert accelerators() == devices


def test_a_gpu_that_is_absent_is_refused_and_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device, how many there are, and the remedy; the CPU only when it was asked for."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with pytest.raises(DevicesError, match=r"cuda:2 .* torch sees 2 GPUs .* --devices cpu"):
        check_device("cuda:2")
    check_device("cuda:1")
    check_device("cpu")
    assert chosen == [1]


def test_the_rendezvous_is_where_redis_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback for a private server, the way to a remote one, and what the operator says before both."""
    monkeypatch.delenv("FURROW_ADDRESS", raising=False)
    assert rendezvous_address(connect("unix:///tmp/nowhere.sock")) == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert rendezvous_address(connect(f"redis://127.0.0.1:{port}/0")) == "127.0.0.1"
    monkeypatch.setenv("FURROW_ADDRESS", "10.0.0.7")
    assert rendezvous_address(connect("unix:///tmp/nowhere.sock")) == "10.0.0.7"


def test_only_an_end_of_its_own_is_a_crash() -> None:
    """A fault's signal or an unknown status; a kill may be anybody's, and Furrow's own statuses have other reasons."""
    crashes = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL, 1, 3)
    assert {poison_kind(status) for status in crashes} == {"crashed"}
    others = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, STOPPED, REFUSED, LOAD_FAILED, STUCK)
    assert {poison_kind(status) for status in others} == {"exited"}


def test_an_exit_is_told_in_words() -> None:
    """A signal by its name, Furrow's own statuses by their meaning, any other by its number."""
    assert [describe(status) for status in (-9, REFUSED, LOAD_FAILED, STUCK, 3)] == [
        "killed by SIGKILL",
        "refused its assignment",
        "could not load",
        "was stuck",
        "exited with status 3",
    ]


ROWS = "0, GPU-aa11, 24564, 20000\n1, GPU-bb22, 8192, 8000\n2, GPU-cc33, [N/A], [N/A]"
MIB = 2**20


@pytest.mark.parametrize(
    ("visible", "order", "free"),
    [
        (None, "PCI_BUS_ID", {"cuda:0": 20000, "cuda:1": 8000}),
        (None, None, {"cuda:0": 8000, "cuda:1": 8000}),
        ("1,0", "PCI_BUS_ID", {"cuda:0": 8000, "cuda:1": 20000}),
        ("GPU-bb,GPU-aa11", None, {"cuda:0": 8000, "cuda:1": 20000}),
        ("2", "PCI_BUS_ID", {}),
        ("7", "PCI_BUS_ID", {}),
        ("", None, {}),
    ],
)
def test_the_memory_of_gpus_is_what_the_driver_tells(
    driver: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    order: str | None,
    free: dict[str, int],
) -> None:
    """By the number that CUDA gives them. Where that may be another one than the driver's, the least counts."""
    driver(ROWS)
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert {device: space.free // MIB for device, space in device_memory().items()} == free


def test_a_driver_that_tells_no_memory_means_none(driver: Callable[[str], None]) -> None:
    driver("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert device_memory() == {}
