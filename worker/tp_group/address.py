"""The address at which this host's ranks can be reached by the other ranks of a group."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from control.errors import SettingsError
from control.redis.address import endpoint
from control.redis.clients import SyncRedis, unavailable
from control.replies import Pong


def rendezvous_address(client: SyncRedis) -> str:
    """FURROW_ADDRESS if set, else the local end of the way to Redis: where Redis is reached, the other hosts are too.

    A private server on loopback or a unix socket gives 127.0.0.1, so nothing listens on a network unless told.
    Raises RedisUnavailable.
    """
    told = os.environ.get("FURROW_ADDRESS")
    if told:
        return told
    place = endpoint(client)
    if place is None:
        return "127.0.0.1"
    try:
        with socket.create_connection(place, timeout=5) as way:
            return str(way.getsockname()[0])
    except OSError as error:
        raise unavailable(client, error) from error


def network() -> str:
    """What processes have in common that share a loopback interface; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Whether an address or a name means the machine itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def check_reachable(address: str, pongs: Sequence[Pong]) -> None:
    """Raise SettingsError where `address`, at which rank 0 is to be reached, is loopback, and a rank is elsewhere.

    `pongs` are by rank. Ranks that don't tell where they are pass.
    """
    own = pongs[0]
    apart = [pong for pong in pongs if own.network and pong.network and pong.network != own.network]
    if not apart or not is_loopback(address):
        return
    ranks = ", ".join(f"rank {pong.rank} on host '{pong.host}'" for pong in apart)
    raise SettingsError(
        f"The ranks of this replica run on several hosts, but host '{own.host}' of rank 0 gives {address} as its "
        f"address, which is another machine's for {ranks}. Start the worker of '{own.host}' with `furrow worker "
        f"--address ADDRESS` (or FURROW_ADDRESS), an address of it that the other hosts reach."
    )
