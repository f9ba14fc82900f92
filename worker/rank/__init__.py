"""A rank process: it carries out commands, sends heartbeats with its progress, counts, and ends."""
