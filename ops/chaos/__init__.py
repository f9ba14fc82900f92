"""Faults on purpose, on a farm that serves."""
