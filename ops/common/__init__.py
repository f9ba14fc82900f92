"""Shared by all rooms: groups of commands, waiting for a condition, and mechanisms switched off for checks."""
