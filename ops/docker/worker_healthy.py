"""Health check of a worker's container: exit 0 while its agent beats. A model's health is the API's /ready."""

from __future__ import annotations

import sys

from control.errors import FurrowError
from control.placement import membership
from control.redis.connection import connect
from control.settings import Settings, host_id


def main() -> int:
    """Say what is wrong on standard error, where `docker inspect` shows it."""
    try:
        living = membership.living_hosts(connect(Settings.from_environment().redis_url))
    except FurrowError as error:
        print(error, file=sys.stderr)
        return 1
    if host_id() in [host.id for host in living]:
        return 0
    print(f"the agent of host {host_id()} does not beat", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
