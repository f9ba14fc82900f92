"""The leader, rank 0: its loop, the requests that it runs, adopts or isolates, and its commands to the group of
ranks."""
