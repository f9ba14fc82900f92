"""Requests as clients send them: types and validation."""
