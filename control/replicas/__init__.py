"""One replica in Redis: its lock, the commands to its ranks, heartbeats, poison, and deaths for lack of memory."""
