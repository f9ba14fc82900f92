"""The leader, rank 0: its loop and the requests that it runs."""
