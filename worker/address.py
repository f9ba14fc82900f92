"""The address at which this host's ranks can be reached by the other ranks of a group."""

from __future__ import annotations

import os
import socket

from control.address import endpoint
from control.clients import SyncRedis, unavailable


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
