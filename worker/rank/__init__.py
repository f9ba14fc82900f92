"""A rank's process: it answers commands, sends heartbeats with its progress, counts, and ends."""
