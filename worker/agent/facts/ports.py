"""Connections between the hosts of a replica, tried as ranks make them: to a free port of the host's address."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

CONNECT_WITHIN_S = 2.0
RETRY_S = 0.5


class Endpoint(NamedTuple):
    address: str
    port: int


class PortProbe:
    """A listener that accepts connections of other agents and closes them at once."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self.endpoint: Endpoint | None = None

    def open(self, address: str) -> None:
        """Listen on a free port of `address`, unless that is done. Raises OSError for one that this host has not."""
        if self.endpoint is not None and self.endpoint.address == address:
            return
        self.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self._listener, self.endpoint = listener, Endpoint(address, listener.getsockname()[1])
        threading.Thread(target=_accept, args=(listener,), name="ports", daemon=True).start()

    def close(self) -> None:
        listener, self._listener, self.endpoint = self._listener, None, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listener.close()


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0 or not _listens(listener):
                return
            time.sleep(RETRY_S)  # a connection that ended at once, or too many open files
            continue
        connection.close()


def _listens(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def connect_to(peers: Mapping[str, Endpoint]) -> dict[str, str]:
    """Hosts → the error of a connection there, empty for none."""
    return {host: _error(one) for host, one in peers.items()}


def _error(endpoint: Endpoint) -> str:
    try:
        socket.create_connection(endpoint, timeout=CONNECT_WITHIN_S).close()
    except OSError as error:
        return f"{endpoint.address}:{endpoint.port}: {error.strerror or error}"
    return ""
