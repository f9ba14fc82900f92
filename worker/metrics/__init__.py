"""Counters of ranks in memory that the host's agent reads, and the agent's /metrics."""
