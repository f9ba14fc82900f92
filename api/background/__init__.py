"""Periodic duties of an API process."""
