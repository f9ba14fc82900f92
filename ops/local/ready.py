"""The readiness of an API process."""

from __future__ import annotations

import http.client


def is_ready(address: tuple[str, int]) -> bool:
    """True if /ready answers 200."""
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
