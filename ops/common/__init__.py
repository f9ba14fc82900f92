"""Shared by all rooms: groups of commands, and waiting for a condition."""
