"""The HTTP handlers, one file per group of routes."""
