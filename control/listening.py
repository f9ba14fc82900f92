"""The address that a part of the farm listens on, checked before anything is started."""

from __future__ import annotations

import errno
import ipaddress
import socket

from control.errors import SettingsError


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a listener on `host`; of names only `localhost` counts as such."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def second_port(host: str, port: int, first: int) -> int:
    """As `free_port`, for `--ollama-port` beside `--port`."""
    if port == first:
        raise SettingsError(f"--ollama-port {port} is --port too; choose another --ollama-port, or leave it out")
    return free_port(host, port, "--ollama-port")


def free_port(host: str, port: int, option: str = "--port") -> int:
    """`port` if it can be bound, a free one for 0. Raises SettingsError naming the option at fault and the remedy;
    `option` is that of the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                remedy = "give --host an address of this machine, or 0.0.0.0 for all of them"
            else:
                remedy = f"choose another {option}"
            raise SettingsError(f"can't listen on {host}:{port}: {error.strerror}; {remedy}") from error
        return int(probe.getsockname()[1])
