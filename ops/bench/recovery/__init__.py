"""Benchmarks of failures and of rolling changes."""
