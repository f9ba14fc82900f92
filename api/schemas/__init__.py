"""Requests as clients send them, with their checks, and answers as they are encoded: one struct each."""
