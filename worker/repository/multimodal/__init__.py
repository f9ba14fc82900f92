"""Checkpoints with images: their text part, and their image part."""
