"""Formats of stored weights: their names, blocks, sizes and parts by rank; no torch."""
