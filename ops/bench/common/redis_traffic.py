"""Counts of the commands that a server has run."""

from __future__ import annotations

from typing import Any

from control.redis.clients import SyncRedis

SENT = ("evalsha", "eval", "xread")
"""The commands that processes send; all others run inside scripts."""


def traffic(client: SyncRedis) -> dict[str, float]:
    """The server's counts so far: commands sent and all, µs in scripts, bytes in and out."""
    stats: Any = client.info("stats")
    commands: Any = client.info("commandstats")
    calls = {name: commands.get(f"cmdstat_{name}", {"calls": 0, "usec": 0}) for name in SENT}
    everything = sum(one["calls"] for one in commands.values())
    return {
        "sent": sum(one["calls"] for one in calls.values()),
        "all": everything,
        "script_us": calls["evalsha"]["usec"] + calls["eval"]["usec"],
        "in": stats["total_net_input_bytes"],
        "out": stats["total_net_output_bytes"],
    }
