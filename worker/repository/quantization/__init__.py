"""Checkpoints whose weights are quantized: the formats that are served, and what their files must hold; no torch."""
