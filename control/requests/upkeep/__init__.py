"""Requests that wait, are orphaned, stranded, abandoned or dead; lists and counts of them."""
