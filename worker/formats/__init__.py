"""Formats of stored weights: their names, blocks and sizes; no torch."""
