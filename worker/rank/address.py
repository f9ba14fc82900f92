"""The address at which this host's ranks can be reached by the other ranks of a group."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from control.commands import Pong
from control.errors import SettingsError
from control.redis.clients import SyncRedis, unavailable
from control.redis.urls import endpoint


def rendezvous_address(client: SyncRedis) -> str:
    """FURROW_ADDRESS if set, else the local address of the connection to Redis, which is 127.0.0.1 for a private
    server. Raises RedisUnavailable."""
    address = os.environ.get("FURROW_ADDRESS")
    if address:
        return address
    place = endpoint(client)
    if place is None:
        return "127.0.0.1"
    try:
        with socket.create_connection(place, timeout=5) as way:
            return str(way.getsockname()[0])
    except OSError as error:
        raise unavailable(client, error) from error


def is_loopback(address: str) -> bool:
    """True if an address or a name means the machine itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def check_reachable(address: str, pongs: Sequence[Pong]) -> None:
    """Raise SettingsError if `address` of rank 0 is loopback and another rank is on another machine. `pongs` are by
    rank. Ranks that don't tell their network pass."""
    own_pong = pongs[0]
    apart = [pong for pong in pongs if own_pong.network and pong.network and pong.network != own_pong.network]
    if not apart or not is_loopback(address):
        return
    ranks = ", ".join(f"rank {pong.rank} on host '{pong.host}'" for pong in apart)
    raise SettingsError(
        f"The ranks of this replica run on several hosts, but host '{own_pong.host}' of rank 0 gives {address} as its "
        f"address, which is another machine's for {ranks}. Start the worker of '{own_pong.host}' with `furrow worker "
        f"--address ADDRESS` (or FURROW_ADDRESS), an address of it that the other hosts reach."
    )
