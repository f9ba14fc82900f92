"""The leader, rank 0: its loop, the requests that it runs, and the group of ranks as it sees it."""
