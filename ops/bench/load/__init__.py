"""Benchmarks of a farm under load, through the HTTP API."""
