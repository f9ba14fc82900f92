"""Wheels with compiled libraries for other machines: `python -m ops.wheels`."""
