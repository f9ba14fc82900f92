"""Faults injected into a farm under load; every stream is checked."""
