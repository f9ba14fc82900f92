"""The /metrics of a host: the counters of its ranks, the host's own series and those of the farm."""
