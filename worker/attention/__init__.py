"""Attention over KV memory."""
