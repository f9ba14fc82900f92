"""The readiness of an API process, and other short questions to one."""

from __future__ import annotations

import http.client


def get(address: tuple[str, int], path: str) -> tuple[int, bytes]:
    """Status and body of a GET; 0 and nothing while no server answers."""
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def is_ready(address: tuple[str, int]) -> bool:
    """True if /ready answers 200."""
    return get(address, "/ready")[0] == 200
