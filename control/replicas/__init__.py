"""A replica as Redis holds it: its lease, the commands to its ranks, its health."""
