"""The counters of this host's ranks as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.rank.counters import SUFFIX, Counters, Labels, read_counters
from worker.rank.series import ALL, Series

Place = tuple[str, str]
"""Model and replica."""
_SERVED_BY = ("furrow_replica_served_by", "Always 1: the replica's tokens are computed by this engine.")
_MEMORY = ("furrow_rank_memory_bytes", "Resident memory of the rank's process.")


class RankCollector(Collector):
    """Reads every rank's counters in a folder. Those of ranks that have ended count on; their gauges are left out."""

    def __init__(self, folder: Path, places: Callable[[], Collection[Place]]) -> None:
        """`places`: the replicas that this host has. Counters of others go with the last process."""
        self._folder, self._places = folder, places
        self._open: dict[Path, tuple[int, Labels, Counters]] = {}
        """The files that are mapped, with their inodes."""

    def collect(self) -> Iterator[Metric]:
        ranks = list(self._ranks())
        for series in ALL:
            yield _family(series, ranks)
        engines = GaugeMetricFamily(*_SERVED_BY, labels=["model_name", "engine", "served_by"])
        for labels, _ in ranks:
            if not labels.rank:
                engines.add_metric([labels.model, labels.replica, labels.served_by], 1)
        yield engines
        memory = GaugeMetricFamily(*_MEMORY, labels=["model_name", "engine", "rank"])
        for labels, counters in ranks:
            size = _resident(counters.pid)
            if size is not None:
                memory.add_metric([labels.model, labels.replica, str(labels.rank)], size)
        yield memory

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry would else collect once to know the names."""
        return iter(())

    def _ranks(self) -> Iterator[tuple[Labels, Counters]]:
        """The counters to show. Files of replicas that have left this host are deleted."""
        places = set(self._places())
        opened: dict[Path, tuple[int, Labels, Counters]] = {}
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                inode = file.stat().st_ino
                before = self._open.get(file)
                entry = before if before is not None and before[0] == inode else (inode, *read_counters(file))
            except (OSError, ValueError):  # of another version of Furrow, or deleted just now
                continue
            _, labels, counters = entry
            if (labels.model, labels.replica) not in places and not psutil.pid_exists(counters.pid):
                file.unlink(missing_ok=True)
                continue
            opened[file] = entry
            yield labels, counters
        self._open = opened


def _family(series: Series, ranks: list[tuple[Labels, Counters]]) -> Metric:
    """One series of all ranks; a leaders' series of the replicas whose leader is here."""
    names = ["model_name", "engine", *(["rank"] if series.rank else []), *([series.label] if series.label else [])]
    family: Any = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }[series.kind](series.name, series.help, labels=names)
    for labels, counters in ranks:
        if labels.rank and not series.rank:
            continue
        who = [labels.model, labels.replica, *([str(labels.rank)] if series.rank else [])]
        cells = counters.read(series)
        if series.kind == "histogram":
            family.add_metric(who, _buckets(series, cells), sum_value=cells[-1])
        elif series.kind == "counter" or psutil.pid_exists(counters.pid):
            for value, cell in zip(series.values, cells, strict=True):
                family.add_metric([*who, *([value] if series.label else [])], cell)
    return family


def _buckets(series: Series, cells: list[float]) -> list[tuple[str, float]]:
    """The cumulative counts by upper bound, as Prometheus wants them."""
    bounds, total = [*(repr(bound) for bound in series.bounds), "+Inf"], 0.0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, cells, strict=False):
        total += count
        buckets.append((bound, total))
    return buckets


def _resident(pid: int) -> int | None:
    """Bytes of a process that lives; None for one that has ended."""
    try:
        return psutil.Process(pid).memory_info().rss if pid else None
    except psutil.Error:
        return None
