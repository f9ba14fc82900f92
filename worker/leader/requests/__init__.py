"""Requests of a leader: claimed, read, run, tried after a crash, emitted."""
