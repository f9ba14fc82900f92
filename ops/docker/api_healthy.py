"""Health check of an API's container: exit 0 while /health answers. /ready tells if its models serve."""

from __future__ import annotations

import sys
import urllib.request

TIMEOUT_S = 3.0


def main(url: str = "http://127.0.0.1:8000/health") -> int:
    """Say what is wrong on standard error, where `docker inspect` shows it."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return 0 if response.status == 200 else 1
    except OSError as error:  # an HTTP error status is one too
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
