"""Attention over cached keys and values: the function registered with transformers, and the arithmetic per device."""
