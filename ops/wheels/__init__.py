"""Wheels: their contents, and compiled libraries for other machines (`python -m ops.wheels`)."""
