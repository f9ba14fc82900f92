"""Series of the farm's hosts and of the commands of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from prometheus_client.core import GaugeMetricFamily, Metric

from control.placement.host_facts import HostFacts
from control.placement.placement import Host
from control.replicas import health


def of_hosts(living: Sequence[Host], drained: AbstractSet[str], facts: Mapping[str, HostFacts | None]) -> list[Metric]:
    """`facts` has every known host; None for one that has told none, or whose facts have lapsed."""

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=labels)

    alive = {host.id for host in living}
    states = gauge("furrow_hosts", "Hosts of the farm, by state.", "state")
    states.add_metric(["alive"], len(alive - drained))
    states.add_metric(["drained"], len(alive & drained))
    states.add_metric(["away"], len(facts.keys() - alive))
    up = gauge("furrow_host_up", "1 while the host's agent has a heartbeat; absent of a drained host without.", "host")
    version = gauge("furrow_host_info", "Furrow's version on the host.", "host", "version")
    clock = gauge("furrow_host_clock_offset_seconds", "The host's clock minus that of Redis.", "host")
    trip = gauge("furrow_host_redis_round_trip_seconds", "Fastest of a few round trips from the host to Redis.", "host")
    free = gauge("furrow_host_free_bytes", "Free space of a folder that the host writes.", "host", "folder")
    for name, own in facts.items():
        if name in alive or name not in drained:
            up.add_metric([name], name in alive)
        if own is None:
            continue
        version.add_metric([name, own.version], 1)
        clock.add_metric([name], own.clock_ms / 1000)
        trip.add_metric([name], own.round_trip_ms / 1000)
        for folder in ("models", "cache", "shared_memory"):
            space = getattr(own, folder)
            if space is not None:
                free.add_metric([name, folder], space.free)
    return [states, up, version, clock, trip, free]


def of_ranks(overviews: Sequence[health.Overview]) -> list[Metric]:
    """The commands of ranks that have a heartbeat."""
    labels = ["model_name", "engine", "rank", "host"]
    age = GaugeMetricFamily("furrow_rank_command_seconds", "Age of the rank's command; 0 between two.", labels=labels)
    stalled = GaugeMetricFamily(
        "furrow_rank_stalled_seconds", "Time since the rank got on in its command; 0 between two.", labels=labels
    )
    progress = GaugeMetricFamily(
        "furrow_rank_progress", "A number that changes as the rank gets on in its command.", labels=labels
    )
    slow = GaugeMetricFamily("furrow_rank_slow", "1 while the other ranks of its group wait for it.", labels=labels)
    for one in overviews:
        for replica in one.replicas:
            for rank, beat in enumerate(replica.beats):
                if beat is not None:
                    values = [one.model, replica.replica, str(rank), beat.host]
                    age.add_metric(values, beat.oldest_pending_ms / 1000)
                    stalled.add_metric(values, beat.stalled_ms / 1000)
                    progress.add_metric(values, beat.progress)
                    slow.add_metric(values, rank in replica.slow)
    return [age, stalled, progress, slow]
