"""A rank: its commands and its part of each, its heartbeat and progress, its counters, its end."""
