"""Heartbeats, progress and exit codes of rank processes."""
