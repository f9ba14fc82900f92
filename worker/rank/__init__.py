"""Rank and standby processes, from their environment to their exit."""
