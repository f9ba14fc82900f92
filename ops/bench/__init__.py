"""Measures a running farm under load, and the engine alone; `furrow bench --help`."""
