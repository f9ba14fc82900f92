"""The address at which ranks look for the leader: those on other machines."""

from __future__ import annotations

import pytest

from control.commands import Pong
from control.errors import SettingsError
from worker.collective.rendezvous import namespace
from worker.rank.address import check_reachable


def pongs(*networks: str) -> list[Pong]:
    return [
        Pong(epoch=1, seq=1, rank=rank, world_size=len(networks), cuda_device="cpu", host=f"h{rank}", network=where)
        for rank, where in enumerate(networks)
    ]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_reaches_no_other_machine(address: str) -> None:
    """Host, address, the rank that can't come, and the remedy are named."""
    with pytest.raises(SettingsError, match=r"'h0' of rank 0 gives .* rank 1 on host 'h1'\. .*--address"):
        check_reachable(address, pongs("a", "b"))


@pytest.mark.parametrize(
    ("address", "networks"),
    [
        ("127.0.0.1", ("a", "a")),
        ("10.0.0.5", ("a", "b")),
        ("node-7", ("a", "b")),
        ("127.0.0.1", ("a", "")),
        ("::1", ("",)),
    ],
)
def test_a_reachable_address_passes(address: str, networks: tuple[str, ...]) -> None:
    """Several agents on one machine share its loopback; who does not tell where it is may be there too."""
    check_reachable(address, pongs(*networks))


def test_processes_of_one_machine_have_one_network() -> None:
    """It does not change."""
    assert namespace("net") == namespace("net")
